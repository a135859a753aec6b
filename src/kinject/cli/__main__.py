"""``python -m kinject.cli``, the form in which ``accelerate launch -m`` starts kinject in several
processes."""

from kinject.cli import program

if __name__ == "__main__":
    raise SystemExit(program())
