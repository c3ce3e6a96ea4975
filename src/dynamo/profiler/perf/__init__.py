"""Performance model of engines: GPUs, model shapes, step times with their uncertainty, calibration by measured points. Pure."""
