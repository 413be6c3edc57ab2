package access

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"path"
	"slices"
	"strings"

	"fleetd/internal/jsonspan"
)

// urlTools are the tools of the firmware that take a URL: to download and run, to download and
// keep, to download and show, to upload the screen. The argument of all is `url`.
var urlTools = []string{"self.upgrade_firmware", "self.assets.set_download_url", "self.screen.preview_image", "self.screen.snapshot"}

const urlArgument = "url"

// TakesURL reports whether the tool's `url` is checked against the allow-list: always for
// tools of stock firmware, and for other tools that a rule of the list contains.
func (g *Guard) TakesURL(tool string) bool {
	return slices.Contains(urlTools, tool) || slices.ContainsFunc(g.urls, func(r urlRule) bool { return MatchAny(r.tools, tool) })
}

const maxURL = 1024 // bytes

// urlRule is a compiled URLRule.
type urlRule struct {
	tools    []string
	prefixes []*url.URL
}

func (r URLRule) compile() (urlRule, error) {
	out := urlRule{tools: r.Tools}
	if err := checkGlobs(r.Tools); err != nil {
		return out, err
	}
	if len(r.Tools) == 0 || len(r.Prefixes) > maxPrefixes {
		return out, fmt.Errorf("a URL rule needs tools and 1 to %d prefixes", maxPrefixes)
	}
	for _, prefix := range r.Prefixes {
		u, err := parseURL(prefix)
		if err != nil {
			return out, fmt.Errorf("prefix %.80q: %w", prefix, err)
		}
		if u.RawQuery != "" {
			return out, fmt.Errorf("prefix %.80q: remove the query", prefix)
		}
		out.prefixes = append(out.prefixes, u)
	}
	return out, nil
}

// parseURL parses a URL. It refuses URLs that could be read in two ways, since the device has
// another parser.
func parseURL(text string) (*url.URL, error) {
	for _, c := range []byte(text) {
		if c <= ' ' || c >= 0x7f || c == '\\' {
			return nil, errors.New("it has a blank, a backslash, or a character that is not ASCII")
		}
	}
	u, err := url.Parse(text)
	switch {
	case len(text) > maxURL:
		return nil, fmt.Errorf("it has more than %d bytes", maxURL)
	case err != nil:
		return nil, errors.New("it is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New("it is neither http nor https")
	case u.Hostname() == "" || u.User != nil || u.Opaque != "" || u.Fragment != "" || strings.Contains(text, "#"):
		return nil, errors.New("it must be scheme, host and path, with no user and no fragment")
	case strings.Contains(u.Path, "\\") || strings.Contains(u.Path, "//") || u.Path != "" && strings.TrimSuffix(u.Path, "/") != strings.TrimSuffix(path.Clean(u.Path), "/"):
		return nil, errors.New("its path contains .., or has empty parts")
	}
	return u, nil
}

// covers reports whether u is under the prefix: the same scheme, host and port, and a path
// that starts with the parts of the prefix's path.
func covers(prefix, u *url.URL) bool {
	if prefix.Scheme != u.Scheme || !strings.EqualFold(prefix.Hostname(), u.Hostname()) || portOf(prefix) != portOf(u) {
		return false
	}
	base := prefix.EscapedPath()
	if base == "" || strings.HasSuffix(base, "/") {
		return base == "" || strings.HasPrefix(u.EscapedPath(), base)
	}
	rest, ok := strings.CutPrefix(u.EscapedPath(), base)
	return ok && (rest == "" || rest[0] == '/')
}

func portOf(u *url.URL) string {
	if port := u.Port(); port != "" {
		return port
	}
	if u.Scheme == "https" {
		return "443"
	}
	return "80"
}

// CheckURL checks the URL in a tool's arguments against the allow-list; nil if it is allowed,
// or if the tool takes none. The device ignores the case of member names and uses the first
// match, so more than one possible match is refused.
func (g *Guard) CheckURL(tool string, arguments json.RawMessage) *Refusal {
	if !g.TakesURL(tool) {
		return nil
	}
	refuse := func(format string, args ...any) *Refusal {
		return &Refusal{Rule: RuleURL, Tool: true, Detail: fmt.Sprintf(format, args...)}
	}
	var given []byte
	found := 0
	walk := jsonspan.Object(arguments)
	for walk.Next() {
		key, _, _ := strings.Cut(string(walk.Key()), "\x00") // the device's reader stops at the NUL
		if strings.EqualFold(key, urlArgument) {
			found++
			given = walk.Value()
		}
	}
	switch {
	case found == 0:
		return nil
	case found > 1:
		return refuse("%d arguments of %s match its url; give only one", found, tool)
	}
	text, ok := jsonspan.String(given)
	if !ok {
		return nil // CheckCall of package catalog refuses it
	}
	u, err := parseURL(text)
	if err != nil {
		return refuse("the url for %s is not valid: %v", tool, err)
	}
	for _, rule := range g.urls {
		if !MatchAny(rule.tools, tool) {
			continue
		}
		if slices.ContainsFunc(rule.prefixes, func(prefix *url.URL) bool { return covers(prefix, u) }) {
			return nil
		}
	}
	// Path and query may contain a secret, and the refusal is written to the audit log.
	return refuse("the url at %s is not on the allow-list for %s; an administrator can add a prefix of it to `urls` of the policy (fleetd policy)", clip(u.Scheme+"://"+u.Host), tool)
}

// clip limits the length of a caller's text in a sentence.
func clip(text string) string {
	const most = 120
	if len(text) > most {
		return text[:most] + "…"
	}
	return text
}
