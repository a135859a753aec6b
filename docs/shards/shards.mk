# The shards of kinject augment as targets of GNU make, four at once: make -j 4 -f shards.mk RECIPE=recipes/augment.yaml
N ?= 8
RECIPE ?= recipes/augment.yaml
SHARDS := $(shell seq $(N))
.PHONY: merge $(SHARDS)

merge: $(SHARDS)
	kinject augment $(RECIPE) --merge

$(SHARDS):
	kinject augment $(RECIPE) --shard $@/$(N)
