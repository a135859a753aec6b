"""The package's own face: the verbs as functions."""

from __future__ import annotations

import subprocess
import sys


def test_the_verbs_are_called_from_the_package_whatever_was_imported_before() -> None:
    code = (
        "import kinject, kinject.train.run, kinject.augment.run, kinject.plan.model, kinject.bench.results\n"
        "for verb in set(kinject.__all__) - {'KinjectError', 'Recipe'}:\n"
        "    for _ in range(2): assert callable(getattr(kinject, verb)), verb\n"
        "import inspect\n"
        "try: kinject.train()\n"
        "except TypeError as error: assert 'recipe' in str(error), error\n"
        "try: kinject.plan()\n"
        "except TypeError as error: assert 'options' in str(error), error\n"
        "assert kinject.train.run.run.__module__ == 'kinject.train.run'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
