package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/cleantext"
	"fleetd/internal/selector"
	"fleetd/internal/timespan"
)

type keysCmd struct {
	Create keysCreateCmd `cmd:"" help:"Create an API key and print its token, which is shown only once."`
	List   keysListCmd   `cmd:"" default:"withargs" help:"List the API keys (the default)."`
	Show   keysShowCmd   `cmd:"" help:"Show one API key, or the one that this command uses."`
	Revoke keysRevokeCmd `cmd:"" help:"End an API key or a grant, at once and on all nodes."`
	Allow  keysAllowCmd  `cmd:"" help:"Print a code with which you allow an application, such as Claude.ai or ChatGPT, to use MCP."`
}

type keysAllowCmd struct {
	Scope   []string `help:"The most that the application may do: devices:read, tools:call, tools:call:user, photos:read, events:read, jobs:read, jobs. Without it, what it asks for and your key may do." placeholder:"SCOPE[,SCOPE]" values:"devices:read,tools:call,tools:call:user,photos:read,events:read,jobs:read,jobs"`
	Devices string   `help:"Only devices that this selects by their labels, such as room=lab; device=ID is one device." placeholder:"SELECT"`
	Tools   []string `help:"Only tools that one of these globs matches." placeholder:"GLOB[,GLOB]"`
	jsonFlags
}

// Run makes the code. It goes to standard output alone.
func (cmd *keysAllowCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if _, err := selector.Parse(cmd.Devices); err != nil {
		return failed("--devices: %w", err)
	}
	code, err := apiclient.Send[api.ConsoleCode](ctx, c, apiclient.Request{Method: http.MethodPost, Path: []string{"console", "codes"},
		Body: api.NewConsoleCode{For: "consent", Scopes: cmd.Scope, Devices: api.Selection{Text: cmd.Devices}, Tools: cmd.Tools}})
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, code)
	}
	fmt.Fprintln(a.stderr, "fleetd: enter this code on the page on which the application asks; it works once, within 5 minutes")
	_, err = fmt.Fprintln(a.stdout, cleantext.Line(code.Code))
	return err
}

type keysCreateCmd struct {
	Name    string   `required:"" help:"Name of the key in refusals and in the audit." placeholder:"NAME"`
	Scope   []string `required:"" help:"Rights: devices:read, photos:read, tools:call, tools:call:user, devices:write, events:read, jobs:read, jobs, webhooks, firmware:read, firmware, audit:read, audio, broker, admin." placeholder:"SCOPE[,SCOPE]" values:"devices:read,photos:read,tools:call,tools:call:user,devices:write,events:read,jobs:read,jobs,webhooks,firmware:read,firmware,audit:read,audio,broker,admin"`
	Devices string   `help:"Only devices that this selects by their labels, such as room=lab or 'room in (lab,hall),!retired'; device=ID is one device." placeholder:"SELECT"`
	Tools   []string `help:"Only tools that one of these globs matches." placeholder:"GLOB[,GLOB]"`
	Expires string   `help:"When it ends: after a duration such as 30d, or at a date such as 2027-01-31 (UTC). Without it the key lasts until it is revoked." placeholder:"30d|DATE"`
	jsonFlags
}

// Run makes the key. Its token goes to standard output alone, so that a script can take it.
func (cmd *keysCreateCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	params := api.NewKey{Name: cmd.Name, Scopes: cmd.Scope, Devices: api.Selection{Text: cmd.Devices}, Tools: cmd.Tools}
	if _, err := selector.Parse(cmd.Devices); err != nil {
		return failed("--devices: %w", err)
	}
	if cmd.Expires != "" {
		at, err := moment(cmd.Expires, a.now(), 1)
		if err != nil {
			return failed("--expires %w", err)
		}
		params.Expires = &at
	}
	k, err := c.CreateKey(ctx, params)
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printValue(a.stdout, k)
	}
	ends := "does not expire"
	if !k.Expires.IsZero() {
		ends = "expires " + k.Expires.UTC().Format(time.RFC3339)
	}
	fmt.Fprintf(a.stderr, "fleetd: key %s (%s) %s; its token is not shown again\n", cleantext.Line(k.ID), cleantext.Line(k.Name), ends)
	_, err = fmt.Fprintln(a.stdout, cleantext.Line(k.Token))
	return err
}

// timeParameter returns the time before now that a flag names, as the API takes it; empty without one.
func timeParameter(flag, text string, now time.Time) (string, error) {
	if text == "" {
		return "", nil
	}
	at, err := moment(text, now, -1)
	if err != nil {
		return "", failed("%s %w", flag, err)
	}
	return at.UTC().Format(time.RFC3339Nano), nil
}

// moment reads a time: a duration ahead of now or, with sign -1, before it; a date; or RFC 3339. The error completes
// a sentence.
func moment(text string, now time.Time, sign int) (time.Time, error) {
	if d, err := timespan.Parse(text); err == nil && d > 0 {
		return now.Add(time.Duration(sign) * d), nil
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("takes a duration such as 30d, a date such as 2027-01-31, or a time such as 2027-01-31T08:00:00Z, not %q", text)
}

type keysListCmd struct {
	listFlags `set:"per=, one key per line"`
}

// Run prints the keys.
func (cmd *keysListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	head := []string{"ID", "NAME", "STATE", "SCOPES", "DEVICES", "TOOLS", "EXPIRES", "USED", "ADDRESS"}
	return printList(ctx, a, a.stdout, c, cmd.listFlags, head, "no keys yet; `fleetd keys create` makes one", func(k api.Key) []string {
		name, grant := k.Name, cmp.Or(k.Grant, &api.Grant{})
		if k.Grant != nil {
			name += " of " + grant.Host
		}
		return []string{k.ID, name, k.State, strings.Join(k.Scopes, ","), cmp.Or(k.Devices.String(), "all"), cmp.Or(strings.Join(k.Tools, ","), "all"), expiry(k.Expires), timeCell(grant.Used), cmp.Or(grant.Address, "-")}
	}, nil, "keys")
}

// expiry is when a key ends.
func expiry(at api.Time) string { return cmp.Or(utcText(at), "never") }

type keysShowCmd struct {
	Key string `arg:"" optional:"" help:"Id or name of a key; without it, the one that belongs to the token in use."`
	jsonFlags
}

// Run prints one key.
func (cmd *keysShowCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Key == "" {
		return printAnswer(ctx, a, c, cmd.JSON, func(self api.Self) error {
			return aligned(a.stdout, "", [][]string{{"Key", self.Key}, {"Name", self.Name}, {"Scopes", strings.Join(self.Scopes, ", ")},
				{"Devices", cmp.Or(self.Devices.String(), "all")}, {"Tools", cmp.Or(strings.Join(self.Tools, ", "), "all")}, {"Expires", expiry(self.Expires)}}, 0)
		}, nil, "self")
	}
	found, err := findKey(ctx, c, cmd.Key)
	if err != nil {
		return err
	}
	if cmd.JSON {
		return printJSON(a.stdout, found.Raw)
	}
	k := found.Value
	rows := [][]string{{"Key", k.ID}, {"Name", k.Name}, {"State", k.State}, {"Scopes", strings.Join(k.Scopes, ", ")},
		{"Devices", cmp.Or(k.Devices.String(), "all")}, {"Tools", cmp.Or(strings.Join(k.Tools, ", "), "all")},
		{"Created", timeText(k.Created.Time, a.now())}, {"Expires", expiry(k.Expires)}}
	if g := k.Grant; g != nil {
		host := g.Host
		if g.Registered {
			host += " (unverified)"
		}
		rows = append(rows, []string{"Application", host}, []string{"Calls itself", cmp.Or(g.Name, "nothing")}, []string{"Opens", g.Resource},
			[]string{"Used", strings.TrimSpace(timeText(g.Used.Time, a.now()) + " " + g.Address)})
	}
	if k.CreatedBy != "" {
		rows = append(rows, []string{"By", k.CreatedBy})
	}
	if !k.Revoked.IsZero() {
		rows = append(rows, []string{"Revoked", timeText(k.Revoked.Time, a.now())})
	}
	return aligned(a.stdout, "", rows, 0)
}

// findKey returns the key of this id, else a valid one of this name, else the last one of this name.
func findKey(ctx context.Context, c *apiclient.Client, name string) (found apiclient.Answer[api.Key], err error) {
	for k, err := range apiclient.List[apiclient.Answer[api.Key]](ctx, c, nil, "keys") {
		switch {
		case err != nil:
			return found, err
		case k.Value.ID == name:
			return k, nil
		case k.Value.Name == name && (k.Value.State == "valid" || found.Value.State != "valid"):
			found = k
		}
	}
	if found.Value.ID == "" {
		return found, fmt.Errorf("no API key has the id or name %q; `fleetd keys` lists them", name)
	}
	return found, nil
}

type keysRevokeCmd struct {
	Key string `arg:"" help:"Id or name of the key."`
	clientFlags
}

// Run revokes.
func (cmd *keysRevokeCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	r, err := c.RevokeKey(ctx, cmd.Key)
	return a.change(cmd.Key, revokedText(r), err)
}
