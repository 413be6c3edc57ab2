# Every target works on a fresh clone with Go and a C compiler (the race
# detector wants one). `make demo` and `make test` are all a newcomer needs.

VERSION    ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT     ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
LDFLAGS    := -s -w -X main.linkedVersion=$(VERSION) -X main.linkedCommit=$(COMMIT)
# The linter is pinned here rather than in go.mod, where it would drag its own
# dependencies into everybody's build.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: all build demo cluster-demo run test check conformance chaos bench release clean
all: build

build: ## both programs, in bin/
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/fleetd ./simulator

demo: build ## a node with embedded defaults and a few simulated devices
	@scripts/demo

cluster-demo: build ## several nodes as one fleet with Postgres and NATS, NODES=3 DEVICES=3 for each
	@scripts/cluster-demo

run: build ## a node alone
	bin/fleetd serve

check: ## formatting, vet, staticcheck
	@scripts/check '$(STATICCHECK)'

test: ## everything: check, unit, integration, end to end, race, short fuzz
	@STATICCHECK='$(STATICCHECK)' scripts/test

conformance: ## the official MCP suite and the Inspector against fleetd; wants npm
	@scripts/conformance

chaos: ## five minutes of faults between three nodes (SEED=n repeats a run, LASTS=d is longer or shorter, TAGS=brokenfence must fail)
	FLEETD_TEST_CHAOS=$(or $(LASTS),5m) FLEETD_TEST_SEED=$(or $(SEED),random) FLEETD_TEST_TAGS=$(TAGS) \
		go test -race -count=1 -timeout 2h -v -run '^TestChaos$$' ./internal/fleettest

bench: build ## the figures of docs/benchmarks.md (BENCH="-baselines DIR" runs their baselines beside them)
	go run ./internal/fleetbench $(BENCH)

release: ## static programs for Linux in dist/, with checksums; the same commit gives the same bytes
	@scripts/release

clean:
	rm -rf bin dist build
