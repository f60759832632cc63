"""Multi-token-prediction heads: what drafts the tokens behind the next one."""

from __future__ import annotations

from mtplx_core.heads.attached import AttachedHead, load_attached_head, save_attached_head
from mtplx_core.heads.base import Head

__all__ = ["AttachedHead", "Head", "load_attached_head", "save_attached_head"]
