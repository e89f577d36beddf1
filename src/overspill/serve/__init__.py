"""The OpenAI-compatible server: `app.create_app` makes it, `listen.run` keeps it up."""
