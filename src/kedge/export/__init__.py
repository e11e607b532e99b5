"""Detectors as ONNX files that work without kedge: export, check, 8-bit quantisation, and running them."""

from kedge.export.int8 import quantise, recalibrate
from kedge.export.onnx import export_onnx
from kedge.export.runtime import Difference, OnnxDetector, compare_verdicts

__all__ = ["Difference", "OnnxDetector", "compare_verdicts", "export_onnx", "quantise", "recalibrate"]
