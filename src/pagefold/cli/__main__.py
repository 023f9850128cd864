"""``python -m pagefold.cli``: the command line where no script is installed."""

from pagefold.cli import app

app(prog_name="pagefold")
