"""A classification model: the demo model with a head of two labels."""

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamo.cpu.config import DEMO_MODEL


def classifier(folder: Path) -> Path:
    """Write the model and return its folder."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("CausalLM", "SequenceClassification")]
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "question", "1": "answer"}}))
    add_tensor(
        folder / "model.safetensors",
        "score.weight",
        np.random.default_rng(1).standard_normal((2, config["hidden_size"])),
    )
    return folder


def add_tensor(path: Path, name: str, values: NDArray[np.float64]) -> None:
    """Add a tensor of 32-bit numbers to a file of tensors, whose own types NumPy need not know."""
    content, added = path.read_bytes(), values.astype(np.float32).tobytes()
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(added)]}
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + data + added)
