// Command conformance runs a node whose MCP server also has the fixtures of the
// official MCP conformance suite; scripts/conformance starts it. Its arguments are
// flags of `fleetd serve`, each with its value: --api-auth none.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"fleetd/internal/config"
	"fleetd/internal/node"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := map[string]string{}
	for i := 0; i+1 < len(args); i += 2 {
		flags[strings.TrimPrefix(args[i], "--")] = args[i+1]
	}
	cfg, err := config.Load(flags, os.Environ())
	if err != nil {
		return err
	}
	return node.RunWith(ctx, cfg, node.Extras{MCP: fixtures{}})
}
