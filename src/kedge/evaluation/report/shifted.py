"""Known classes in other conditions: what the classifier gets right there, and what the detector accepts."""

from kedge.evaluation import Evaluation
from kedge.evaluation.report.markup import Html, section, table, tag
from kedge.evaluation.report.tables import percent
from kedge.evaluation.summary import starred

WORDS = (
    "These images show known classes under a shift that is not one of meaning. A detector that accepts what the "
    "classifier still gets right is useful; one that flags them all has learned how the pictures were taken. Flagged "
    "should therefore be near the share of wrong predictions, and the accuracy of accepted images above that of all. "
    "AURC is the mean error over all shares of images kept, those with low scores first."
)
HEADS = ("accuracy", "flagged", "accuracy of accepted", "AURC")


def shifted(evaluation: Evaluation) -> Html | None:
    """A table for each shifted set; None where there is none."""
    tables = []
    for name in evaluation.shifted_names:
        rows = []
        for label, result in evaluation.results.items():
            found = result.shifted[name]
            values = (found.accuracy, result.flagged[name], found.accepted_accuracy, found.aurc)
            cells = (tag("td", percent(value)) for value in values)
            rows.append(tag("tr", tag("th", starred(label, result), scope="row"), *cells))
        heads = [tag("th", words, scope="col") for words in ("Detector", *HEADS)]
        caption = f"{name}, {len(evaluation.sets[name])} images, in percent."
        tables.append(table(caption, heads, rows, label=f"Results on {name}"))
    return section("shifted", "Shifted images of known classes", tag("p", WORDS), *tables) if tables else None
