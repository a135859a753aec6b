"""The package's own face: the verbs as functions."""

from __future__ import annotations

import subprocess
import sys


def test_the_verbs_are_functions_whatever_was_imported_before() -> None:
    code = (
        "import inspect, pydoc, sys, kinject\n"
        "assert not {'torch', 'yaml', 'numpy', 'pandas', 'asyncio'} & sys.modules.keys(), 'heavy'\n"
        "page = pydoc.render_doc(kinject, renderer=pydoc.plaintext)\n"
        "import kinject.augment.survey\n"
        "assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys(), 'kinject try is heavy'\n"
        "import kinject.train.run, kinject.augment.run, kinject.plan.model, kinject.bench.results, kinject.report\n"
        "import kinject.train.checkpoints as checkpoints\n"
        "assert set(dir(kinject)) == {*kinject.__all__, '__version__'}\n"
        "for name in set(kinject.__all__) - {'KinjectError', 'Recipe'}:\n"
        "    verb = getattr(kinject, name)\n"
        "    assert inspect.isfunction(verb), name\n"
        "    assert 'kinject.' in verb.__doc__.split(chr(10) + chr(10))[-1], name\n"
        "    assert inspect.signature(verb).return_annotation is not inspect.Signature.empty, name\n"
        "    assert f' {name}(' in page, name\n"
        "    assert pydoc.render_doc(verb, renderer=pydoc.plaintext)\n"
        "try: kinject.train()\n"
        "except TypeError as error: assert 'recipe' in str(error), error\n"
        "assert kinject.train.run.run.__module__ == 'kinject.train.run'\n"
        "assert kinject.train.checkpoints is checkpoints is sys.modules['kinject.train.checkpoints']\n"
        "from kinject.train import render_summary\n"
        "assert kinject.train.render_summary is render_summary\n"
        "assert kinject.Recipe.__name__ == 'Recipe'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
