"""From an LLVM module to object code or assembly for a `Target`."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from ignis.errors import KernelError
from ignis.target import Target


def target_machine(target: Target) -> llvm.TargetMachine:
    """A code generator for `target`, whichever machine this is."""
    if target.is_x86:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=3, reloc="pic", codemodel="jitdefault",
        jit=True,
    )  # fmt: skip


def optimise(module: ir.Module, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    """Run LLVM's -O3 pipeline, without the vectorizers: kernels spell their vectors out."""
    module.data_layout = str(machine.target_data)
    try:
        reference = llvm.parse_assembly(str(module))
        reference.verify()
    except RuntimeError as error:
        raise KernelError(f"LLVM refuses module {module.name}: {error}") from error
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(reference, builder)
    return reference


def emit_object(module: ir.Module, target: Target) -> bytes:
    machine = target_machine(target)
    return bytes(machine.emit_object(optimise(module, machine)))


def emit_assembly(module: ir.Module, target: Target) -> str:
    machine = target_machine(target)
    return str(machine.emit_assembly(optimise(module, machine)))
