"""Write the tables of docs/results into the pages that show them, and a picture.

    python docs/tables.py
    python docs/tables.py --add insight runs/insight-small/cifar10/metrics.json
    python docs/tables.py --add photos runs/photos-small/metrics.json

With --add, the rows of a run are first added to docs/results; a run of a study on features takes the place of what is
there, with rounded numbers.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from kedge.evaluation.summary import TextTable
from kedge.files import atomic
from kedge.studies import STUDIES, head_tables, imagenet, photos
from kedge.studies.bench import TITLES
from kedge.studies.cifar10_trained import DEFAULT, by_network_tables
from kedge.studies.comparison import MethodTable
from kedge.studies.default import NEIGHBOURS, SHRINKAGES, TRIPLES, leave_one_out
from kedge.studies.insight import BUDGETS
from kedge.studies.judged import corrected
from kedge.studies.leaderboard import STANDARD_TRAINING, leaderboard, leaderboard_methods
from kedge.studies.study import Setting
from kedge.studies.task import GROUPS
from kedge.studies.tasks import TASKS, VARIED

DOCS = Path(__file__).parent
PAGES = (
    DOCS.parent / "README.md",
    DOCS / "suites" / "cifar10-fast.md",
    DOCS / "suites" / "cifar10-longer.md",
    DOCS / "suites" / "insight.md",
    DOCS / "speed.md",
    DOCS / "anchoring.md",
    DOCS / "suites" / "heads.md",
    DOCS / "default.md",
    DOCS / "suites" / "photos.md",
    DOCS / "suites" / "cifar10-trained.md",
    DOCS / "suites" / "default.md",
    DOCS / "comparing.md",
    DOCS / "results.md",
    DOCS / "suites" / "imagenet.md",
)
FRONT = ("mds++ + gen", "knn", "energy", "mds++", "msp", "gen")  # rows of the study `default` that the README shows
COLUMNS = (  # and those whose columns its page shows
    "mds++ + gen",
    "rmds++",
    "knn",
    "nnguide",
    "energy",
    "mds++",
    "vim",
    "msp",
    "fdbd",
    "react",
    "gen",
    "kl_uniform",
)
SHOWN_RULES = (  # rows of the study `default` that its page shows: the best methods, and combinations for each question
    "mds++ + gen",
    *(f"mds++ + gen, {rule}" for rule in ("fisher", "stouffer", "quantiles", "max", "copula", "mahalanobis")),
    *(f"mds++ + {part}" for part in ("msp", "energy", "kl_uniform", "fdbd")),
    *(f"{part} + gen" for part in ("knn", "rmds++", "cop")),
    *(f"mds++ (shrinkage {share}) + gen" for share in SHRINKAGES),
    *(f"knn (k = {k}) + gen" for k in NEIGHBOURS),
    *(" + ".join(parts) for parts in TRIPLES),
    "knn",
    "rmds++",
    "nnguide",
    "mds++",
    "energy",
    "gen",
)
BASELINES = {  # unanchored networks of the study `insight` whose names differ from their anchored counterparts
    "unanchored": "anchored",
    "unanchored, differences": "masked, uniform",
    "unanchored, T as noise": "anchored",
    "unanchored, T as noise, narrow, 32 epochs": "narrow, 32 epochs",
    "compact, unanchored": "compact, fresh stem",
    "compact, unanchored, 24 epochs": "compact, fresh stem, 24 epochs",
}
SHOWN = {  # scores in the picture, and their marks
    "AMP": "o",
    "no tau": "x",
    "tau alone": "^",
    "KL to uniform": "D",
}
CHOSEN = (  # rows of cifar10-fast that the page of insight shows
    "AMP",
    "AMP, tau mean, TTA, 6 views",
    "AMP (masked)",
    "AMP, class means, TTA, 6 views (masked)",
    "AMP (synthetic outliers)",
    "AMP, recommended",
    "AMP, recommended, tau permuted",
    "KL to uniform",
    "KL to uniform (synthetic outliers)",
    "KL to uniform, TTA, 5 views (synthetic outliers)",
)
HEADS = (  # tables of the study of heads
    "heads",
    "heads by column",
    "heads, short",
    "heads, errors",
    "heads, errors beside MSP",
    "heads, kernel",
    "heads, views",
)
# Tables of the study of photographs, and the rows that its page shows of them; none for all.
COMPARED = ("msp", "energy", "kl_uniform", "gen", "fdbd", "react", "knn", "nnguide", "mds++", "rmds++", "vim")
PHOTOS: dict[str, Collection[str]] = {
    "frozen": (),
    "frozen, by column": (DEFAULT, *COMPARED),
    "frozen, conditions": ("accuracy", DEFAULT, *COMPARED),
    "fine-tuned": (),
    "fine-tuned, conditions": ("accuracy", DEFAULT, *COMPARED),
    "anchored": (),
    "few images": (),
}
TOLERANCE = 1e-5  # of the largest score, as in benchmarks/peers.py
CIFAR10 = {"cifar10-resnet20": "ResNet-20", "cifar10-resnet56": "ResNet-56"}  # tasks with public networks
DRAWS = "AMP, other anchors"  # rows that only serve to measure noise

Value = Callable[[Mapping[str, Any]], float]


def main() -> None:
    """Add what is to be added, and write all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("STUDY", "METRICS"), help="a study, and the metrics.json of a run")
    options = parser.parse_args()
    if options.add:
        study, path = options.add
        found = json.loads(Path(path).read_text())
        if study in STUDIES:
            (suite,) = STUDIES[study](Setting("small")).suites
            text = json.dumps(added(results(study), found, list(suite.methods)), indent=1)
        else:
            shortened = {"photos": of_rows, "default": by_group}.get(study, dict)(found)
            text = json.dumps(rounded(shortened), separators=(",", ":"))
        with atomic(DOCS / "results" / f"{study}.json") as temporary:
            temporary.write_text(text + "\n")
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    draw(results("insight"), DOCS / "insight.png")


def results(name: str) -> dict[str, Any]:
    """The results of a study or a benchmark."""
    found: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text())
    return found


def added(known: Mapping[str, Any], found: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Results with the rows of another run on the same images, in the order of the study; the run's rows count."""

    def rows(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        both = {**ours, **theirs}
        return {label: both[label] for label in sorted(both, key=list(order).index)}

    seeds = {}
    for seed, ours in known["seeds"].items():
        theirs = found["seeds"].get(seed)
        if theirs is None or theirs["sets"] != ours["sets"]:
            raise SystemExit(f"the run must have all seeds of the results, and the same images; seed {seed} differs")
        seeds[seed] = {**ours, "results": rows(ours["results"], theirs["results"])}
    trainings = {**known["record"]["trainings"], **found["record"]["trainings"]}
    hours = sum(each["seconds"] or 0.0 for each in trainings.values()) / 3600
    # The command stays that of the whole; each training says where and with what it was made.
    record = {**known["record"], "training hours": round(hours, 2), "trainings": trainings}
    return {"record": record, "seeds": seeds, "summary": rows(known["summary"], found["summary"])}


def rounded(value: Any) -> Any:
    """Plain data with numbers to four decimals, without the summaries that follow from the rest."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items() if key != "summary"}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def of_rows(known: Mapping[str, Any]) -> dict[str, Any]:
    """The results of photographs without combinations other than the default, which has a page of its own."""

    def kept(part: Mapping[str, Any]) -> dict[str, Any]:
        return {**part, "results": {label: each for label, each in part["results"].items() if shown(label)}}

    def shown(label: str) -> bool:
        return " + " not in label or label in (DEFAULT, f"{DEFAULT} + AMP")

    return {what: part if what == "record" else kept(part) for what, part in known.items()}


def by_group(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results of a study on many tasks with the means over near and far sets in place of each set."""
    if "results" not in found:
        return dict(found)

    def short(result: Mapping[str, Any]) -> dict[str, Any]:
        sets = {
            group: {
                metric: statistics.fmean(result["sets"][name][metric] for name in names)
                for metric in result["sets"][names[0]]
            }
            for group, names in result["groups"].items()
        }
        kept = {key: value for key, value in result.items() if key not in ("shifted", "images") and value}
        return {**kept, "sets": sets, "groups": {group: [group] for group in sets}}

    results = {
        label: {task: {seed: short(result) for seed, result in by_seed.items()} for task, by_seed in by_task.items()}
        for label, by_task in found["results"].items()
    }
    return {**found, "results": results}


def filled(text: str) -> str:
    """A page with its tables as the results have them."""
    tables: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
        "summary": ("cifar10-fast", summary),
        "longer": ("cifar10-longer", summary),
        "longer sets": ("cifar10-longer", partial(by_set, metric="fpr95")),
        "longer aurocs": ("cifar10-longer", partial(by_set, metric="auroc")),
        "sets": ("cifar10-fast", partial(by_set, metric="fpr95")),
        "aurocs": ("cifar10-fast", partial(by_set, metric="auroc")),
        "more": ("cifar10-fast", more),
        "chosen": ("cifar10-fast", partial(summary, only=CHOSEN)),
        "budgets": ("insight", budgets),
        "near": ("insight", partial(by_network, number=0)),
        "phase-randomized": ("insight", partial(by_network, number=1)),
        "rare": ("insight", rare_readings),
        "times": ("inference", times),
        "shipped": ("shipped", times),
        "quality": ("shipped", cost_in_quality),
        "quality of one view": ("shipped-one-view", cost_in_quality),
        "photographs that exit early": ("early-exit-photos", exits_early),
        "peers": ("peers", peers),
        "verdicts": ("default-cost", verdicts),
        "eight bits": ("default-cost", eight_bits),
        "batches of AMP": ("amp-batches", times),
        "waiting": ("scoring-photos", waiting),
        "requests": ("serving-photos", requests),
        "neighbours": ("neighbours", neighbours),
        "neighbours found": ("neighbours", neighbours_found),
        "start": ("startup", start),
        "peers, inference": ("inference-peers", peers_in_passes),
        "leaderboard": ("default", beside_leaderboard),
        "own passes": ("field", own_passes),
        **{name: ("heads", partial(of_heads, name=name)) for name in HEADS},
        "heads, cost": ("heads-cost", heads_cost),
        **{
            f"imagenet, {what}": ("imagenet", lambda known, n=n: imagenet.interval_tables(known)[n].markdown() + "\n")
            for n, what in enumerate(("AUROC", "flagged", "accuracy", "Table 5"))
        },
        **{
            f"trained, {what}": (
                "cifar10-trained",
                lambda known, n=n: by_network_tables(parts(known))[n].markdown() + "\n",
            )
            for n, what in enumerate(("classifiers", "near", "far"))
        },
        **{f"photos, {what}": ("photos", partial(of_photos, what=what)) for what in PHOTOS},
        "photos, judged": ("photos", photos_judged),
        **{name: ("default", partial(of_default, name=name)) for name in DEFAULT_TABLES},
    }
    for name, (source, table) in tables.items():
        before, mark, rest = text.partition(f"<!-- table {name} -->\n")
        if mark:
            text = before + mark + table(results(source)) + "<!-- end -->" + rest.partition("<!-- end -->")[2]
    return text


def parts(known: Mapping[str, Any]) -> dict[str, MethodTable]:
    """The tables of a study that has several."""
    return {name: MethodTable.from_record(each) for name, each in known.items() if name != "record"}


def of_photos(known: Mapping[str, Any], what: str) -> str:
    """A table of the study of photographs, with the rows that its page shows."""
    table = photos.tables(parts(known))[what]
    rows = tuple(row for row in table.rows if row[0] in PHOTOS[what]) if PHOTOS[what] else table.rows
    return replace(table, rows=rows).markdown() + "\n"


def photos_judged(known: Mapping[str, Any]) -> str:
    """The default against all single methods, of which some are shown, and anchored networks against others."""
    tables = parts(known)
    pairs = {}
    for what in (photos.FROZEN, photos.FINETUNED):
        if what in tables:
            ours = tables[what].mean(DEFAULT)
            pairs |= {(f"{what}: {DEFAULT}", each): (ours, tables[what].mean(each)) for each in tables[what].single}
    for layer in (each for each in photos.LAYERS if each in tables):
        for label, other in (("AMP", "kl_uniform"), (DEFAULT, DEFAULT), (f"{DEFAULT} + AMP", DEFAULT)):
            ours, theirs = tables[layer].mean(label), tables[photos.FINETUNED].mean(other)
            pairs[f"{layer}: {label}", f"{photos.FINETUNED}: {other}"] = ours, theirs
    table = corrected(pairs, "AUROC, mean over columns")
    failing = [row for row in table.rows if row[-1] == "no"]
    rows = tuple(row for row in table.rows if row in failing or row[1].partition(": ")[2] or row[1] in COMPARED)
    return replace(table, rows=rows).markdown() + " All comparisons above 0.05 are shown.\n"


def of_default(known: Mapping[str, Any], name: str) -> str:
    """A table of the study of the default detector."""
    return DEFAULT_TABLES[name](MethodTable.from_record(known)).markdown() + "\n"


DEFAULT_TABLES: dict[str, Callable[[MethodTable], TextTable]] = {
    "front": lambda table: table.of_tasks(TASKS).summary(FRONT),
    "default": lambda table: table.of_tasks(TASKS).summary(SHOWN_RULES),
    "default, all": lambda table: table.of_tasks(TASKS).summary(),
    "default by column": lambda table: table.of_tasks(TASKS).by_column(COLUMNS),
    "default, variants": lambda table: table.of_tasks(VARIED).summary(SHOWN_RULES),
    "default, variants by column": lambda table: table.of_tasks(VARIED).by_column(COLUMNS),
    "default, left out": leave_one_out,
    "default, differences": lambda table: table.of_tasks(TASKS).less("mds++ + gen", COLUMNS + SHOWN_RULES),
}


def of_heads(known: Mapping[str, Any], name: str) -> str:
    """A table of the study of heads."""
    return head_tables.tables_of_heads(known)[name].markdown() + "\n"


def heads_cost(known: Mapping[str, Any]) -> str:
    """Time of an anchored head and its network in plain passes, by batch and number of anchors."""
    rows = []
    for row in known["rows"]:
        ratios = f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"
        rows.append([str(row["batch"]), str(row["anchors"]), f"{row['by operations']:.3f}", *ratios])
    return markdown(["images at a time", "anchors", "passes by operations", "in time", "quartiles"], rows)


def summary(known: Mapping[str, Any], only: Collection[str] = ()) -> str:
    """All methods, or some: means over the far sets, the near set by itself, and the cost; the lowest FPR95 first."""
    (near,) = next(iter(known["seeds"].values()))["apart"]
    columns: dict[str, Value] = {
        "accuracy": lambda r: r["accuracy"],
        "far: AUROC ↑": lambda r: r["mean"]["auroc"],
        "far: FPR95 ↓": lambda r: r["mean"]["fpr95"],
        "near: AUROC ↑": lambda r: r["metrics"][near]["auroc"]["value"],
        "near: FPR95 ↓": lambda r: r["metrics"][near]["fpr95"]["value"],
    }
    rows = [
        [label, *(words(known, label, value) for value in columns.values()), passes(first(known)[label])]
        for label in ordered(known)
        if not only or label in only
    ]
    return markdown(["method", *columns, "passes"], rows)


def more(known: Mapping[str, Any]) -> str:
    """Other metrics: means over the far sets, calibration of the classifier, and the time."""
    of = next(iter(known["seeds"].values()))
    columns: dict[str, Value] = {
        "AUPR-in ↑": lambda r: r["mean"]["aupr_in"],
        "AUPR-out ↑": lambda r: r["mean"]["aupr_out"],
        "DTACC ↑": lambda r: r["mean"]["dtacc"],
        "ECE ↓": lambda r: r["ece"],
        "AURC ↓": lambda r: r["aurc"],
    }
    columns |= {f"flagged, {name}": partial(_flagged, name) for name in (of["id"], *of["shifted"])}
    rows = []
    for label in ordered(known):
        milliseconds = statistics.median(values_of(known, label, lambda r: r["milliseconds_per_image"]))
        cells = [words(known, label, value) for value in columns.values()]
        rows.append([label, *cells, f"{milliseconds:.1f}"])
    return markdown(["method", *columns, "ms per image"], rows)


def _flagged(name: str, result: Mapping[str, Any]) -> float:
    share: float = result["flagged"][name]
    return share


def by_set(known: Mapping[str, Any], metric: str) -> str:
    """One metric of all methods on every set."""
    sets = list(next(iter(first(known).values()))["metrics"])
    rows = []
    for label in ordered(known):
        values: list[Value] = [lambda r, ood=ood: r["metrics"][ood][metric]["value"] for ood in sets]  # type: ignore[misc]
        rows.append([label, *(words(known, label, value) for value in values)])
    return markdown(["method", *sets], rows)


def readings(known: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The rows of the study `insight`: by network, an unanchored one after its anchored counterpart, and score."""
    found: dict[str, dict[str, str]] = {}
    for label in first(known):
        network, _, reading = label.partition(": ")
        found.setdefault(network, {})[reading] = label
    order = list(found)

    def place(network: str) -> tuple[int, bool]:
        anchored = BASELINES.get(network, network.removeprefix("unanchored, "))
        return order.index(anchored if anchored in found else network), anchored != network

    return {network: found[network] for network in sorted(found, key=place)}


def common(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The scores of more than two networks."""
    times = Counter(reading for of in rows.values() for reading in of)
    return [reading for reading, count in times.items() if count > 2]


def by_network(known: Mapping[str, Any], number: int) -> str:
    """AUROC / FPR95 on one set, of every network by every score."""
    rows, ood = readings(known), list(next(iter(first(known).values()))["metrics"])[number]
    lines = []
    for network, of in rows.items():
        cells = [both(known, of[reading], ood) if reading in of else "" for reading in common(rows)]
        lines.append([network, words(known, next(iter(of.values())), lambda r: r["accuracy"]), *cells])
    return markdown(["network", "accuracy", *common(rows)], lines)


def budgets(known: Mapping[str, Any]) -> str:
    """The narrow networks by epochs, AUROC / FPR95 on either set: the same passes side by side."""
    sets = list(next(iter(first(known).values()))["metrics"])
    lines = []
    for epochs in BUDGETS:
        for network, *shown in (
            (f"narrow, {epochs} epochs", "AMP", "AMP, recommended"),
            (f"unanchored, narrow, {epochs} epochs", "KL to uniform", "KL to uniform, TTA, 5 views"),
        ):
            labels = [f"{network}: {reading}" for reading in shown]
            cells = [both(known, label, ood) for ood in sets for label in labels]
            accuracies = [words(known, label, lambda r: r["accuracy"]) for label in labels]
            lines.append([network, " / ".join(accuracies), *cells])
    heads = [f"{place}: {what}" for place in ("near", "phase-randomized") for what in ("one view", "TTA")]
    return markdown(["network", "accuracy, with TTA", *heads], lines)


def rare_readings(known: Mapping[str, Any]) -> str:
    """The scores of few networks, on both sets."""
    rows, sets = readings(known), list(next(iter(first(known).values()))["metrics"])
    lines = [
        [network, reading, *(both(known, label, ood) for ood in sets)]
        for network, of in rows.items()
        for reading, label in of.items()
        if reading not in common(rows)
    ]
    return markdown(["network", "score", *sets], lines)


def both(known: Mapping[str, Any], label: str, ood: str) -> str:
    """AUROC / FPR95."""
    return f"{percent(known, label, ood, 'auroc'):.1f} / {percent(known, label, ood, 'fpr95'):.1f}"


def percent(known: Mapping[str, Any], label: str, ood: str, metric: str) -> float:
    """The mean over seeds of a metric on one set."""
    return 100 * statistics.fmean(values_of(known, label, lambda r: r["metrics"][ood][metric]["value"]))


def draw(known: Mapping[str, Any], path: Path) -> None:
    """FPR95 of every network on either set, by the main scores."""
    import matplotlib.pyplot as plt

    rows, sets = readings(known), list(next(iter(first(known).values()))["metrics"])
    figure, axes = plt.subplots(1, len(sets), figsize=(11, 0.32 * len(rows) + 1.2), sharey=True, layout="constrained")
    for axis, ood in zip(axes, sets, strict=True):
        for number, (reading, marker) in enumerate(SHOWN.items()):
            at = {place: of[reading] for place, of in enumerate(rows.values()) if reading in of}
            rates = [percent(known, label, ood, "fpr95") for label in at.values()]
            axis.plot(rates, list(at), marker, color=f"C{number}", label=reading)
        axis.set(title=ood, xlabel="FPR95, percent", yticks=range(len(rows)), yticklabels=list(rows))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SHOWN), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def times(known: Mapping[str, Any]) -> str:
    """Time in unanchored passes, with quartiles, by network, engine and batch; and the memory at the largest batch."""
    batches, memory = known["options"]["batches"], known["options"]["memory"]
    lines = []
    for record in known["networks"]:
        by: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in record["inference"]:
            by.setdefault(row["engine"], {})[row["batch"]] = row
        for engine, of in by.items():
            cells = [f"{of[b]['ratio']:.2f} ({of[b]['low']:.2f} to {of[b]['high']:.2f})" for b in batches]
            cells += [f"{of[batches[-1]]['memory'] / 1e6:.0f}"] if memory else []
            lines.append([record["name"], TITLES[engine], *cells])
    heads = [*(f"batch {b}" for b in batches), *([f"MB at {batches[-1]}"] if memory else [])]
    return markdown(["network", "engine", *heads], lines)


def verdicts(known: Mapping[str, Any]) -> str:
    """Time of the default detector's engines in plain passes, with quartiles, by network and batch."""
    columns = list(dict.fromkeys((row["subject"], row["batch"]) for row in known["verdicts"]))
    by: dict[str, dict[tuple[str, int], str]] = {}
    for row in known["verdicts"]:
        cell = f"{row['median']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        by.setdefault(row["engine"], {})[row["subject"], row["batch"]] = cell
    heads = ["engine", *(f"{subject}, batch {batch}" for subject, batch in columns)]
    return markdown(heads, [[engine, *(of.get(each, "") for each in columns)] for engine, of in by.items()])


def eight_bits(known: Mapping[str, Any]) -> str:
    """What 8 bits keep of the default detector's labels and of its AUROC on each set."""
    quality = known["quality"]
    sets = list(quality["exact"])
    rows = []
    for engine, of in quality.items():
        if engine.endswith("int8"):
            points = [f"{of['points'][name]:+.2f}" for name in sets]
            rows.append([engine, f"{100 * of['labels']:.1f}", *points])
    exact = [f"{quality['exact'][name]:.2f}" for name in sets]
    heads = ["engine", "labels kept, %", *(f"AUROC, {name}" for name in sets)]
    return markdown(heads, [["exact", "100.0", *exact], *rows])


def waiting(known: Mapping[str, Any]) -> str:
    """The share of time in which the network waits for photographs, by how they are read."""
    rows = [
        [name, f"{100 * statistics.median(of):.1f} ({100 * min(of):.1f} to {100 * max(of):.1f})"]
        for name, of in known["waiting"].items()
    ]
    return markdown(["read by", "time in which the network waits, %"], rows)


def requests(known: Mapping[str, Any]) -> str:
    """The service with photographs uploaded, beside the bare detector and scripts."""
    names = ("engine", "in pairs", "decoding in pairs")
    rows = []
    for level in known["levels"]:
        cells = [f"{level[f'service / {name}']:.2f}" for name in names]
        memory = " to ".join(f"{each / 1e6:.0f}" for each in level["memory"])
        times = [f"{1000 * level['p50']:.0f}", f"{1000 * level['p99']:.0f}"]
        rows.append([str(level["clients"]), f"{level['service']:.0f}", *cells, *times, memory, str(level["errors"])])
    heads = [f"service / {name}" for name in names]
    return markdown(["clients", "images/s", *heads, "p50, ms", "p99, ms", "MB", "errors"], rows)


def neighbours(known: Mapping[str, Any]) -> str:
    """What a query of a large bank costs by exact scan and by index."""
    rows = []
    for of in known["banks"]:
        spans = [of["ratios"][way] for way in ("exact scan", "index")]
        cells = [f"{each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for each in spans]
        cells += [f"{of['index']['probes']:,} of {of['index']['cells']:,}", f"{of['index']['count']:,}"]
        cells += [f"{of['seconds']['build']:.0f}", f"{of['MB']['bank']:,.0f} + {of['MB']['index']:,.0f}"]
        rows.append([of["method"], f"{of['rows']:,}", *cells])
    heads = ["method", "rows", "exact scan / pass", "index / pass", "cells", "candidates", "built in, s"]
    return markdown([*heads, "MB of bank + index"], rows)


def neighbours_found(known: Mapping[str, Any]) -> str:
    """The recall of the index by kind of image, and AUROC with the exact scan and with the index."""
    rows = []
    for of in known["banks"]:
        for kind, recall in of["recall"].items():
            areas = [
                f"{of[f'auroc {way}'][kind]:.2f}" if kind in of["auroc exact"] else "" for way in ("exact", "index")
            ]
            rows.append([of["method"], f"{of['rows']:,}", kind, f"{100 * recall:.1f}", *areas])
    return markdown(["method", "rows", "images", "recall, %", "AUROC, exact", "AUROC, index"], rows)


def start(known: Mapping[str, Any]) -> str:
    """Times of fresh processes over that of ``import torch`` in the same round."""
    return markdown(
        ["process", "/ import torch"], [[name, f"{row['of torch']:.2f}"] for name, row in known["rows"].items()]
    )


def exits_early(known: Mapping[str, Any]) -> str:
    """The share of photographs that exit early, and early exit beside all anchors: means over seeds."""
    by_set: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in known["rows"]:
        by_set.setdefault((row["group"], row["images"]), []).append(row)
    lines = []
    for (group, images), rows in by_set.items():
        exits = [100 * row["exits"] for row in rows]
        mean = {key: statistics.fmean(row[key] for row in rows) for key in ("passes", "agreement")}
        cells = [f"{group}, {images}", f"{statistics.fmean(exits):.1f} ({min(exits):.1f} to {max(exits):.1f})"]
        cells += [f"{mean['passes']:.2f}", f"{100 * mean['agreement']:.1f}"]
        for key, digits in (("flagged", 1), ("auroc", 2)):
            both = [[row[f"{key}_{how}"] for row in rows] for how in ("early", "exact")]
            cells.append(" / ".join(f"{100 * statistics.fmean(each):.{digits}f}" for each in both if None not in each))
        lines.append(cells)
    heads = [
        "images",
        "exit early, %",
        "passes",
        "same labels, %",
        "flagged, %, early / exact",
        "AUROC, %, early / exact",
    ]
    return markdown(heads, lines)


def cost_in_quality(known: Mapping[str, Any]) -> str:
    """Labels, AUROC and FPR95 of every engine beside the exact one: means over all sets, and the set that lost most."""
    lines = []
    for engine, of in known["quality"].items():
        test = next(name for name in of["flagged"] if name not in of["auroc"])
        area, rate = of["auroc_points"].values(), of["fpr95_points"].values()
        cells = [f"{100 * of['agreement']:.1f}", f"{100 * of['flagged'][test]:.1f}"]
        cells.append(f"{of['passes'][test]:.2f}" if of["passes"] else "")
        cells += [
            f"{statistics.fmean(area):+.2f} ({min(area):+.2f})",
            f"{statistics.fmean(rate):+.2f} ({max(rate):+.2f})",
        ]
        lines.append([TITLES[engine], *cells])
    heads = [
        "engine",
        "same labels, %",
        "flagged, %",
        "passes",
        "AUROC, points (worst set)",
        "FPR95, points (worst set)",
    ]
    return markdown(heads, lines)


def peers(known: Mapping[str, Any]) -> str:
    """Scores and times of kedge beside pytorch-ood's; methods whose definitions differ have a note."""
    rows = []
    for row in known["rows"]:
        passed = row["difference"] <= TOLERANCE * row["scale"]
        difference = f"{row['difference']:.1e}" if passed else "differ"
        ratios = [f"{ratio:.2f}" if ratio else "" for ratio in (row["fit_ratio"], row["score_ratio"])]
        rows.append([row["name"], f"{row['correlation']:.6f}", difference, *ratios])
    scores, fits = ([row[key] for row in known["rows"] if row[key]] for key in ("score_ratio", "fit_ratio"))
    for name, of in (("median", statistics.median), ("largest", max)):
        rows.append([name, "", "", f"{of(fits):.2f}", f"{of(scores):.2f}"])
    notes = "\n" + "".join(f"- {row['name']}: {row['note']}.\n" for row in known["rows"] if row["note"])
    return markdown(["method", "rank correlation", "largest difference", "fit, ratio", "score, ratio"], rows) + notes


def beside_leaderboard(known: Mapping[str, Any]) -> str:
    """AUROC / FPR95 on the public CIFAR-10 networks, and AUROC on OpenOOD's leaderboard, whose order this is."""
    table, names = MethodTable.from_record(known).of_tasks(CIFAR10), leaderboard_methods()
    board = {
        names[entry.method]: {"near": entry.near[0], "far": entry.far[0]}
        for entry in leaderboard("cifar10")
        if entry.training == STANDARD_TRAINING and entry.method in names
    }
    labels = (*table.single, "mds++ + gen")
    found = {label: {column: table.value(label, column).mean for column in table.columns} for label in labels}
    shared = sorted((label for label in found if label in board), key=lambda label: -sum(board[label].values()))
    others = sorted((label for label in found if label not in board), key=lambda label: -sum(found[label].values()))
    rows = []
    for label in (*shared, *others):
        cells = [
            f"{100 * auroc:.1f} / {100 * table.value(label, column, 'fpr95').mean:.0f}"
            for column, auroc in found[label].items()
        ]
        rows.append([label, *cells, *(f"{board[label][group]:.1f}" if label in board else "" for group in GROUPS)])
    for name, left_out in (("rank correlation with the leaderboard", ""), ("the same without weiper", "weiper")):
        kept = [label for label in shared if label != left_out]
        ranks = [
            spearmanr([found[label][column] for label in kept], [board[label][column[1]] for label in kept]).statistic
            for column in table.columns
        ]
        rows.append([name, *(f"{rank:.2f}" for rank in ranks), "", ""])
    heads = [f"{CIFAR10[task]} {group}" for task, group in table.columns]
    return markdown(["method", *heads, "leaderboard near", "far"], rows)


def own_passes(known: Mapping[str, Any]) -> str:
    """AUROC with its interval / FPR95 of methods with passes of their own, on a sample."""
    rows = []
    for label, result in known["results"].items():
        cells = []
        for group in ("near", "far"):
            low, value, high = (100 * result[group]["auroc"][key] for key in ("low", "value", "high"))
            cells.append(f"{value:.1f} ({low:.1f} to {high:.1f}) / {100 * result[group]['fpr95']['value']:.0f}")
        rows.append([label, *cells, passes(result)])
    return markdown(["method", "near", "far", "passes"], rows)


def peers_in_passes(known: Mapping[str, Any]) -> str:
    """pytorch-ood's detectors on the network without anchoring, in unanchored passes."""
    batches = known["options"]["batches"]
    lines = []
    for record in known["networks"]:
        by: dict[str, dict[int, float]] = {}
        for row in record["peers"]:
            by.setdefault(row["method"], {})[row["batch"]] = row["ratio"]
        lines += [[record["name"], method, *(f"{of[b]:.2f}" for b in batches)] for method, of in by.items()]
    return markdown(["network", "pytorch-ood", *(f"batch {b}" for b in batches)], lines)


def first(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """The results of the first seed."""
    results: Mapping[str, Any] = next(iter(known["seeds"].values()))["results"]
    return results


def ordered(known: Mapping[str, Any]) -> list[str]:
    """The methods, the lowest mean FPR95 first."""
    labels = [label for label in first(known) if not label.startswith(DRAWS)]
    return sorted(labels, key=lambda label: statistics.fmean(values_of(known, label, lambda r: r["mean"]["fpr95"])))


def values_of(known: Mapping[str, Any], label: str, value: Value) -> list[float]:
    """A value by seed."""
    return [value(seed["results"][label]) for seed in known["seeds"].values()]


def words(known: Mapping[str, Any], label: str, value: Value) -> str:
    """A value in percent: the mean over seeds, and its deviation where it differs between them."""
    values = values_of(known, label, value)
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(set(values)) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation}"


def passes(result: Mapping[str, Any]) -> str:
    """Passes through the network for one image, forward + backward."""
    cost = result["passes_per_image"]
    return f"{cost['forward']} + {cost['backward']}" if cost["backward"] else str(cost["forward"])


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    lines.insert(1, "|---" + "|---:" * (len(heads) - 1) + "|")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
