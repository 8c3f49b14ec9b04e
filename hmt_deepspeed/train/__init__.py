"""The main job: text, tokeniser, model and the training loop that `launch/run.py` puts together."""
