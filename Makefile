# Every target works on a fresh clone with Go; those that use the race detector (race, verify, chaos, kills) need a C
# compiler, too. `make demo` and `make test` are all that a first try needs.

VERSION    ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT     ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
LDFLAGS    := -s -w -X main.linkedVersion=$(VERSION) -X main.linkedCommit=$(COMMIT)

.PHONY: all build demo cluster-demo run quick test race verify check conformance hosts chaos fuzz kills mutants bench simulate release reference lines clean
all: build

build: ## both programs, in bin/
	@scripts/build '$(LDFLAGS)'

demo: build ## a node with embedded defaults and a few simulated devices (AWAY=30s/2m: each is away now and then)
	@AWAY=$(AWAY) scripts/demo

cluster-demo: build ## several nodes as one fleet with Postgres and NATS, NODES=3 DEVICES=3 for each
	@scripts/cluster-demo

run: build ## a node alone
	bin/fleetd serve

check: ## formatting, words, vet, staticcheck
	@scripts/check lint

quick: ## the tests of what has changed since the last commit of origin (or the last green make test), in about a minute
	@scripts/quick

test: ## what judges a change: formatting, words, vet, unit, integration, end to end
	@scripts/test

race: ## the same tests with the race detector, in the programs that they start, too
	@scripts/test race

verify: ## race, staticcheck and what takes longer: chaos, outages at full length, fuzz, conformance, a generated client, release (PART="chaos fuzz"; attacks by name)
	@scripts/verify $(PART)

hosts: ## hosts that log in, as they are: Claude Code by its document and by registration, the TypeScript SDKs; wants npm
	@scripts/hosts

conformance: ## the official MCP suite, the Inspector and the TypeScript SDK v1 against fleetd; wants npm
	@scripts/conformance

chaos: ## five minutes of faults between three nodes (SEED=n repeats a run, SEEDS=20 makes several, LASTS=d, TAGS=brokenfence must fail)
	@SEED=$(SEED) SEEDS=$(SEEDS) LASTS=$(LASTS) TAGS=$(TAGS) scripts/chaos

fuzz: ## all fuzz targets for half an hour (TIME=4m)
	@scripts/fuzz $(or $(TIME),30m)

kills: ## 200 kills of a writing store, and of a node with fresh decisions (KILLS=n)
	go test -race -count=$(or $(KILLS),200) -timeout 4h -run 'SurvivesKill' ./internal/store/storetest
	go test -race -count=$(or $(KILLS),200) -timeout 4h -run '^TestDecisionsOutliveAKill$$' ./internal/fleettest

mutants: ## breaks the code in a hundred places, one after the other: an assertion must fail in each
	go test -tags mutants -timeout 1h -v -run '^TestMutants$$' ./internal/repotest

bench: build ## the figures of docs/benchmarks.md, each beside its baseline (BENCH="-only call,idle")
	@scripts/bench . $(BENCH)

reference: ## writes docs/reference and openapi.json from the program; make test compares them
	FLEETD_TEST_UPDATE=1 go test -count=1 -run '^TestReference$$' ./cmd/fleetd ./internal/config ./internal/devices ./internal/explain ./internal/node ./internal/restapi

lines: ## the product's lines by package, with code and with comments, and what is beside it (REV=commit)
	@REV=$(REV) scripts/lines

simulate: ## what a fleet costs past one machine: 20 nodes and 200,000 devices in memory (SIM="-nodes 5 -devices 2000")
	@scripts/bench ./sim $(SIM)

release: ## static programs for Linux, and the command line for macOS and Windows, in dist/, with checksums; the same commit gives the same bytes
	@scripts/release

clean:
	rm -rf bin dist build
