"""Ask a service about image files, with nothing but Python's standard library.

Start it with ``kedge serve detector.kedge``; then ``python examples/service_client.py http://localhost:8000 a.jpg``.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any


def ask(address: str, file: str) -> dict[str, Any]:
    """The answer about one image file: label, class, probability, score, p_value, is_ood."""
    body, headers = Path(file).read_bytes(), {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"{address}/v1/score", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        (result,) = json.load(response)["results"]
    return dict(result)


def main(address: str, *files: str) -> None:
    """Print a line for each file."""
    for file in files:
        answer = ask(address, file)
        verdict = f"OUT OF DISTRIBUTION ({answer['reason']})" if answer["is_ood"] else "in distribution"
        print(f"{file}: {answer['class'] or answer['label']}, {verdict}, p {answer['p_value']:.2g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
