"""What requests and answers look like, for the OpenAPI page."""

from typing import Any

from pydantic import BaseModel, Field


class Result(BaseModel):
    """What the detector says of one image."""

    label: int = Field(description="Number of the predicted class.")
    name: str | None = Field(description="Its name, where classes have names.")
    probability: float = Field(description="Of the predicted class, calibrated.")
    score: float = Field(description="Larger is further out of distribution.")
    temperature: float | None = Field(description="How far the anchors disagree, for methods that have anchors.")
    p_value: float = Field(description="The share of in-distribution images that would score at least this high.")
    is_ood: bool = Field(description="Whether the image is flagged as out of distribution.")


class Answer(BaseModel):
    """A result for each image, in order."""

    results: list[Result]


class Info(BaseModel):
    """What the detector is."""

    method: str
    classes: list[str]
    input: list[int]
    accepts: float
    threshold: float | None = Field(description="Scores above it are flagged; null where none ever is.")
    calibration_images: int
    passes_per_image: int
    version: str


class Problem(BaseModel):
    """Why there is no result."""

    detail: str


BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "image/*": {"schema": {"type": "string", "format": "binary"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
        "application/json": {
            "schema": {
                "oneOf": [
                    {"type": "object", "required": ["image"], "properties": {"image": {"type": "string"}}},
                    {
                        "type": "object",
                        "required": ["images"],
                        "properties": {"images": {"type": "array", "items": {"type": "string"}}},
                    },
                ]
            },
            "example": {"images": ["iVBORw0KGgo..."]},
        },
    },
}
