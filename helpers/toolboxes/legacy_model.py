"""For the toolbox ``legacy``: a model folder as Transformers 4.51 could read it, which newer versions no longer write.

Three names have changed since: ``rope_theta`` (now inside ``rope_parameters``), ``torch_dtype`` (now ``dtype``), and the
tokenizer's class. Standard library only, so that both archived tools can import it.
"""

import json
import shutil
from pathlib import Path


def old_form(model: str, folder: Path) -> str:
    """Link or copy the folder `model` into `folder` with its configuration in the old form; returns the new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(model).iterdir():
        target = folder / file.name
        if file.suffix == ".safetensors":
            target.unlink(missing_ok=True)
            target.symlink_to(file.resolve())
        elif file.is_file():
            shutil.copyfile(file, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters", None) or {}
    config.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    config["torch_dtype"] = config.pop("dtype", None) or config.get("torch_dtype", "bfloat16")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        settings = json.loads(tokenizer.read_text(encoding="utf-8"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return str(folder)
