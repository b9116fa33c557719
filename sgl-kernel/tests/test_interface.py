"""The number of the interface changes with the operators, so that an engine notices an older package."""

import hashlib

import torch

import sgl_kernel

#: Of each interface the digest of all operators' schemas. A change of an operator needs a new number here, in
#: `sgl_kernel.INTERFACE` and in the engine's `kernels/compiled.py`; so does another layout of packed numbers.
DIGESTS = {3: "39654dd8feec73b0"}


def schemas():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("sgl_kernel::")}
    return sorted(str(torch._C._get_schema(name, "")) for name in names)


def digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_the_number_stands_for_these_operators():
    assert DIGESTS[sgl_kernel.INTERFACE] == digest(schemas()), "an operator has changed: raise INTERFACE"


def test_an_operator_that_changes_would_be_noticed():
    lines = schemas()
    assert len(lines) > 20
    changed = [lines[0].replace("Tensor", "int", 1), *lines[1:]]
    assert digest(changed) != digest(lines) and digest(lines[1:]) != digest(lines)
