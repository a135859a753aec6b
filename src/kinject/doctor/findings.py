"""What the doctor says: a finding, and a complaint with its cure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Complaint:
    """Something that will not work: where, what is wrong, and what to do."""

    where: str
    what: str
    cure: str


@dataclass(frozen=True)
class Finding:
    """One line about the machine."""

    name: str
    value: str
    complaints: tuple[Complaint, ...] = ()
