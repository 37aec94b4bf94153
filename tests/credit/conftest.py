from hypothesis import settings

# a busy machine takes its time: no example is wrong for being slow
settings.register_profile("accredit", deadline=None)
settings.load_profile("accredit")
