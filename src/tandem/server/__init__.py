"""The API server: HTTP in front of one engine instance.

``app.build_app`` makes the application, ``run.run_server`` serves it until a signal drains it.
The server owns text (tokenizer, chat template, stop strings); the instance sees token ids alone.
This file imports nothing, so that the template worker starts without the web stack.
"""
