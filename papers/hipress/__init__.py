"""HiPress (IEEE TPDS 2023): ``page`` lists its tables and figures."""
