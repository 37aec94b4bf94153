"""`accredit report`: one page, without network, on which a researcher sees where the credit of a run went."""
