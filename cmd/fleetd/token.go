package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"fleetd/internal/apiclient"
)

type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" help:"Make an API key and print its token, which is shown this once."`
	List   tokenListCmd   `cmd:"" help:"List the API keys."`
	Revoke tokenRevokeCmd `cmd:"" help:"End an API key, at once and on all nodes."`
}

type tokenCreateCmd struct {
	Name    string   `required:"" help:"What the key is called in refusals and in the audit." placeholder:"NAME"`
	Scope   []string `required:"" help:"Rights: devices:read, tools:call, tools:call:user, devices:write, events:read, audio, admin." placeholder:"SCOPE[,SCOPE]"`
	Devices string   `help:"Only devices with all of these labels; device=ID is one device." placeholder:"LABEL=VALUE[,...]"`
	Tools   []string `help:"Only tools that one of these globs matches." placeholder:"GLOB[,GLOB]"`
	Expires string   `help:"When it ends: after a duration such as 720h, or at a date such as 2027-01-31 (UTC). Without it the key lasts until it is revoked." placeholder:"720h|DATE"`
	clientFlags
}

// Run makes the key. Its token goes to standard output alone, so that a script can take it.
func (cmd *tokenCreateCmd) Run(ctx context.Context, a *app) error {
	wish := apiclient.KeyWish{Name: cmd.Name, Scopes: cmd.Scope, Tools: cmd.Tools}
	var err error
	if wish.Devices, err = parseSelector(cmd.Devices); err != nil {
		return err
	}
	if cmd.Expires != "" {
		at, err := moment(cmd.Expires, a.now(), 1)
		if err != nil {
			return failed("--expires %w", err)
		}
		wish.Expires = &at
	}
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	k, err := c.CreateKey(ctx, wish)
	if err != nil {
		return err
	}
	ends := "does not expire"
	if !k.Expires.IsZero() {
		ends = "expires " + k.Expires.UTC().Format(time.RFC3339)
	}
	fmt.Fprintf(a.stderr, "fleetd: key %s (%s) %s; its token is not shown again\n", oneLine(k.ID), oneLine(k.Name), ends)
	_, err = fmt.Fprintln(a.stdout, oneLine(k.Token))
	return err
}

// parseSelector reads label=value,label=value.
func parseSelector(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	selector := make(map[string]string)
	for pair := range strings.SplitSeq(text, ",") {
		label, value, found := strings.Cut(strings.TrimSpace(pair), "=")
		if _, twice := selector[label]; !found || label == "" || twice {
			return nil, failed("--devices takes label=value, each label once, not %q", text)
		}
		selector[label] = value
	}
	return selector, nil
}

// moment reads a time: a duration ahead of now or, with sign -1, before it; a date; or RFC 3339. The error completes
// a sentence.
func moment(text string, now time.Time, sign int) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return now.Add(time.Duration(sign) * d), nil
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if at, err := time.Parse(layout, text); err == nil {
			return at, nil
		}
	}
	return time.Time{}, fmt.Errorf("takes a duration such as 720h, a date such as 2027-01-31, or a time such as 2027-01-31T08:00:00Z, not %q", text)
}

type tokenListCmd struct {
	JSON bool `name:"json" help:"Print the server's JSON, one key per line."`
	clientFlags
}

// Run prints the keys.
func (cmd *tokenListCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	rows := [][]string{{"ID", "NAME", "STATE", "SCOPES", "DEVICES", "TOOLS", "EXPIRES"}}
	for k, err := range c.Keys(ctx) {
		if err != nil {
			return err
		}
		if cmd.JSON {
			if err := printJSONLine(a.stdout, k.Raw); err != nil {
				return err
			}
			continue
		}
		expires := "never"
		if !k.Expires.IsZero() {
			expires = k.Expires.UTC().Format(time.RFC3339)
		}
		rows = append(rows, []string{k.ID, k.Name, k.State, strings.Join(k.Scopes, ","), selectorText(k.Devices), cmp.Or(strings.Join(k.Tools, ","), "all"), expires})
	}
	switch {
	case cmd.JSON:
		return nil
	case len(rows) == 1:
		fmt.Fprintln(a.stdout, "no keys yet; `fleetd token create` makes one")
		return nil
	}
	return table(a.stdout, "", rows)
}

func selectorText(selector map[string]string) string {
	var pairs []string
	for _, label := range slices.Sorted(maps.Keys(selector)) {
		pairs = append(pairs, label+"="+selector[label])
	}
	return cmp.Or(strings.Join(pairs, ","), "all")
}

type tokenRevokeCmd struct {
	Key string `arg:"" help:"Id or name of the key."`
	clientFlags
}

// Run revokes.
func (cmd *tokenRevokeCmd) Run(ctx context.Context, a *app) error {
	return a.change(ctx, cmd.clientFlags, (*apiclient.Client).RevokeKey, cmd.Key, "revoked")
}
