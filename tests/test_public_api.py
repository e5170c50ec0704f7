"""What `import legato` offers, and that neither it nor the command line imports torch."""

import subprocess
import sys


def test_public_api_is_what_all_says_and_needs_no_torch():
    code = """
import sys
import legato
assert "torch" not in sys.modules and "numba" not in sys.modules
needs_torch = set(legato._NEEDS_TORCH)
for name in legato.__all__:
    if name not in needs_torch:
        getattr(legato, name)
modules = {n for n in vars(legato) if n in sys.modules or f"legato.{n}" in sys.modules}
public = {n for n in vars(legato) if not n.startswith("_")} - modules
print(sorted(public - {"annotations", "Any"} - set(legato.__all__)))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_command_line_imports_torch_only_in_commands_that_need_it():
    code = "import sys, legato.cli; print({'torch', 'transformers', 'numba', 'pyarrow', 'plotly'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
