"""The graph neural network: trained with torch-geometric, shipped as ONNX, used with onnxruntime alone."""
