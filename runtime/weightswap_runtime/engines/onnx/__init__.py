"""The engine `onnx`: ONNX Runtime, every weight an input of the graph."""
