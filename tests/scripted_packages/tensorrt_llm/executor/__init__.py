"""Part of a scripted TensorRT-LLM."""
