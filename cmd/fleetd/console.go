package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"runtime"
	"slices"
	"strings"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
)

type consoleCmd struct {
	Scope  []string `help:"Only these rights of the key; without it all of them." placeholder:"SCOPE[,SCOPE]"`
	NoOpen bool     `name:"no-open" help:"Print the link alone, and start no browser."`
	clientFlags
}

// Run prints a one-time link to the console, and opens it if a person is there.
func (cmd *consoleCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	self, err := apiclient.Get[api.Self](ctx, c, nil, "self")
	if err != nil {
		return err
	}
	link := c.Base() + "/console/"
	note := "this node requires no key"
	if self.Key != "open" {
		code, err := apiclient.Send[api.ConsoleCode](ctx, c, apiclient.Request{Method: http.MethodPost, Path: []string{"console", "codes"}, Body: api.NewConsoleCode{Scopes: cmd.Scope}})
		if err != nil {
			return err
		}
		link += "#code=" + code.Code
		note = fmt.Sprintf("the link works once, within a minute; the browser then has a key of its own for 12 h, which ends with yours (%s)", cleantext.Line(self.Name))
	}
	if _, err := fmt.Fprintln(a.stdout, link); err != nil {
		return err
	}
	fmt.Fprintln(a.stderr, "fleetd:", note)
	if a.interactive && !cmd.NoOpen && a.open != nil {
		if err := a.open(link); err != nil {
			fmt.Fprintf(a.stderr, "fleetd: open the link in a browser; it was not opened for you: %v\n", err)
		}
	}
	return nil
}

// openBrowser starts the system's browser. It does not wait for it.
func openBrowser(environ []string) func(link string) error {
	return func(link string) error {
		args := browserCommand(runtime.GOOS, environ)
		if args == nil {
			return errors.New("this session has no display")
		}
		cmd := exec.Command(args[0], append(args[1:], link)...)
		if err := cmd.Start(); err != nil {
			return err
		}
		return cmd.Process.Release()
	}
}

// browserCommand returns the command that opens a link; nil without a graphical session.
func browserCommand(system string, environ []string) []string {
	switch system {
	case "darwin":
		return []string{"open"}
	case "windows":
		return []string{"rundll32", "url.dll,FileProtocolHandler"}
	}
	if !slices.ContainsFunc(environ, func(e string) bool {
		name, value, _ := strings.Cut(e, "=")
		return (name == "DISPLAY" || name == "WAYLAND_DISPLAY") && value != ""
	}) {
		return nil
	}
	return []string{"xdg-open"}
}
