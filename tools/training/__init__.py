"""Training of drafters: a target's own dialogues, losses over random anchors, the published schema."""
