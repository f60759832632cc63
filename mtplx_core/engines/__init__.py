"""The engines without drafts, the scripted one, and what all engines share."""
