"""Engines behind one synchronous interface; see `helpers.engines.base`. Import the module of the engine you need."""
