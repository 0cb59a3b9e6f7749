from hypothesis import settings

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("executor", deadline=None)
settings.load_profile("executor")
