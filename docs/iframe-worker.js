// Search in pages that are opened as files: browsers allow no workers there, so the worker runs in a hidden frame.
// mkdocs-material fetches the same from unpkg.com (iframe-worker, MIT, Copyright (c) 2020-2025 Martin Donath).
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.frame = frame;
      this.window = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === this.window) this.dispatchEvent(new MessageEvent("message", {data: event.data}));
      });
      const write = (scope) => {
        scope.postMessage = (data) => parent.postMessage(data, "*");
        scope.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => new Promise((done) => {
          const script = scope.document.createElement("script");
          script.src = each;
          script.onload = done;
          scope.document.body.appendChild(script);
        })), Promise.resolve());
      };
      this.window.document.open();
      this.window.document.write(`<body><script>(${write})(window)</script><script src="${url}"></script></body>`);
      this.window.document.close();
      this.loaded = new Promise((resolve) => { this.window.onload = resolve; });
    }

    postMessage(data) {
      this.loaded.then(() => this.window.dispatchEvent(new MessageEvent("message", {data})));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
