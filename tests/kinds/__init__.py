"""Tables on which the core of the contract is tried."""
