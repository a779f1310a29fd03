"""Make the step that is saved in this folder, and compare it with the run: python step.py"""

import json
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent


def find(name: str) -> Any:
    """The class of a dotted name, which may be inside a class."""
    module, names = name, list[str]()
    while True:
        try:
            value: Any = import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            names.insert(0, last)
            if not module:
                raise
    for part in names:
        value = getattr(value, part)
    return value


def make(node: Any) -> Any:
    """The object that a node of the config describes."""
    if isinstance(node, list):
        return [make(item) for item in node]
    if not isinstance(node, dict):
        return node
    values = {key: make(value) for key, value in node.items() if key not in ("_target_", "_args_", "_partial_")}
    return find(node["_target_"])(*make(node.get("_args_", [])), **values) if "_target_" in node else values


def fill(structure: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """A batch from its structure and tensors."""
    ((kind, value),) = structure.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "mapping":
        return {key: fill(item, tensors) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [fill(item, tensors) for item in value]
        return tuple(items) if kind == "tuple" else items
    return value


def loss_of(outputs: Any) -> Any:
    """The loss of what the model returned."""
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else outputs


def main() -> int:
    sys.path.insert(0, str(Path.cwd()))
    facts = json.loads((HERE / "step.json").read_text())
    before, after = load_file(HERE / "before.safetensors"), load_file(HERE / "after.safetensors")
    torch.set_num_threads(facts["threads"])
    torch.use_deterministic_algorithms(facts["deterministic"])
    model = make(facts["model"])
    model.load_state_dict({key[6:]: value for key, value in before.items() if key.startswith("model/")})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in facts["frozen"])
    for name, module in model.named_modules():
        module.training = name not in facts["evaluating"]
    parameters = dict(model.named_parameters())
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in facts["groups"]]
    optimizer = find(facts["optimizer"])(groups)
    for name, parameter in parameters.items():
        prefix = f"optimizer/{name}/"
        state = {key[len(prefix) :]: value for key, value in before.items() if key.startswith(prefix)}
        if state:
            optimizer.state[parameter] = state
    torch.set_rng_state(before["rng"])
    total = sum(batch["weight"] for batch in facts["batches"])
    unit = facts["batches"][0]["weight"]
    for number, batch in enumerate(facts["batches"], 1):
        inputs = fill(batch["structure"], load_file(HERE / f"batch{number}.safetensors"))
        autocast = torch.autocast("cpu", torch.bfloat16) if facts["dtype"] == "bf16" else nullcontext()
        call = facts["model_call"]
        with autocast:
            loss = loss_of(model(*inputs) if call == "args" else model(**inputs) if call == "kwargs" else model(inputs))
        (loss if len(facts["batches"]) == 1 else loss * (batch["weight"] / unit)).backward()
        print(f"loss {loss.item()!r}, in the run {batch['loss']!r}")
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(facts["batches"]) > 1:
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.div_(total / unit)
    if facts["clip_norm"] is not None:
        torch.nn.utils.clip_grad_norm_(trained, facts["clip_norm"])
    if facts["clip_value"] is not None:
        torch.nn.utils.clip_grad_value_(trained, facts["clip_value"])
    optimizer.step()
    computed = model.state_dict()
    names = [key[6:] for key in after if key.startswith("model/")]
    equal = [name for name in names if torch.equal(computed[name], after[f"model/{name}"])]
    print(f"{len(equal)} of {len(names)} weights and buffers are those after step {facts['step']}, bit for bit")
    return 0 if len(equal) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
