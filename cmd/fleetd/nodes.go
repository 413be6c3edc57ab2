package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/config"
)

// healthTime bounds a health check; container platforms give one a few seconds.
const healthTime = 2 * time.Second

type nodesCmd struct {
	listFlags `set:"per=, one node per line"`
}

// Run prints the nodes.
func (cmd *nodesCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return printList(ctx, a, a.stdout, c, cmd.listFlags, []string{"NAME", "VERSION", "DEVICES", "STARTED", "API"}, "", func(n api.Node) []string {
		return []string{n.Name, cmp.Or(n.Version, "-"), strconv.Itoa(n.Devices), timeCell(n.Started), cmp.Or(n.API, "-")}
	}, nil, "nodes")
}

type logLevelCmd struct {
	Level string `arg:"" optional:"" help:"debug, info, warn or error; without it, the level is shown." values:"debug,info,warn,error"`
	jsonFlags
}

// Run shows or sets the level of the one node that the command talks to.
func (cmd *logLevelCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	format, request := "%s\n", apiclient.Request{Path: []string{"log-level"}}
	if cmd.Level != "" {
		format, request.Method, request.Body = "the node logs at %s until it stops\n", http.MethodPut, api.LogLevel{Level: cmd.Level}
	}
	return printSent(ctx, a, c, cmd.JSON, func(level api.LogLevel) error {
		_, err := fmt.Fprintf(a.stdout, format, cleantext.Line(level.Level))
		return err
	}, request)
}

type healthcheckCmd struct {
	Live    bool   `help:"Only whether the node runs: it serves devices also while its database or NATS is away."`
	DataDir string `help:"Data directory of the local node ($FLEETD_DATA_DIR)." placeholder:"./fleetd-data" group:"Node"`
	API     string `name:"api" help:"Base URL of a node's API, used instead of the data directory ($FLEETD_API)." placeholder:"URL" group:"Node"`
}

// Run requests the readiness once. Every failure has the same exit status, the one that container platforms define.
func (cmd *healthcheckCmd) Run(ctx context.Context, a *app) error {
	at := config.LoadClient(config.Client{DataDir: cmd.DataDir, API: cmd.API}, a.environ)
	c, err := apiclient.Locate(at.DataDir, at.API)
	if err != nil {
		return exitError{err, exitFailed}
	}
	ctx, cancel := context.WithTimeout(ctx, healthTime)
	defer cancel()
	check, healthy := c.Ready, "ready"
	if cmd.Live {
		check, healthy = c.Live, "live"
	}
	if err := check(ctx); err != nil {
		return exitError{err, exitFailed}
	}
	_, err = fmt.Fprintln(a.stdout, healthy)
	return err
}
