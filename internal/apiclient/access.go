package apiclient

import (
	"context"
	"encoding/json"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Key is an API key without what proves it.
type Key struct {
	ID      string    `json:"id"`
	Name    string    `json:"name"`
	Scopes  []string  `json:"scopes"`
	Devices Selection `json:"devices"`
	Tools   []string  `json:"tools"`
	// State is "valid", "expired" or "revoked".
	State string `json:"state"`
	// Expires is zero if it never does.
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
	Revoked time.Time `json:"revoked"`
	// Token is there only in the answer to CreateKey.
	Token string `json:"token"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (k *Key) UnmarshalJSON(data []byte) error {
	type plain Key
	return withRaw(data, (*plain)(k), &k.Raw)
}

// NewKeyParams describe a new key.
type NewKeyParams struct {
	Name    string     `json:"name"`
	Scopes  []string   `json:"scopes"`
	Devices string     `json:"devices,omitempty"` // select text
	Tools   []string   `json:"tools,omitempty"`
	Expires *time.Time `json:"expires,omitempty"`
}

// CreateKey makes a key; its Token is shown this once.
func (c *Client) CreateKey(ctx context.Context, params NewKeyParams) (Key, error) {
	var k Key
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("keys"), nil, params, &k)
	return k, err
}

// Keys returns all keys, oldest first.
func (c *Client) Keys(ctx context.Context) iter.Seq2[Key, error] {
	return list[Key](ctx, c, pathOf("keys"), nil)
}

// RevokeKey ends a key, given by id or name.
func (c *Client) RevokeKey(ctx context.Context, key string) (Revocation, error) {
	return c.revoke(ctx, http.MethodDelete, pathOf("keys", key))
}

// Selection is a selection of devices as text; empty selects all. Servers send it as text, or as an object of labels.
type Selection string

// UnmarshalJSON reads both forms.
func (s *Selection) UnmarshalJSON(data []byte) error {
	var labels map[string]string
	if json.Unmarshal(data, &labels) != nil {
		return json.Unmarshal(data, (*string)(s))
	}
	var terms []string
	for _, label := range slices.Sorted(maps.Keys(labels)) {
		terms = append(terms, label+"="+labels[label])
	}
	*s = Selection(strings.Join(terms, ","))
	return nil
}

// Self is the caller as the server knows it.
type Self struct {
	Name string `json:"name"`
	// Key is the key's id; "admin" or "open" without an API key.
	Key     string    `json:"key"`
	Scopes  []string  `json:"scopes"`
	Devices Selection `json:"devices"`
	Tools   []string  `json:"tools"`
	// Expires is zero if it never does.
	Expires time.Time `json:"expires"`
	Admin   bool      `json:"admin"`
	// Raw is the answer as received.
	Raw json.RawMessage `json:"-"`
}

// Self returns who the token of this client belongs to, and what it may do.
func (c *Client) Self(ctx context.Context) (Self, error) {
	content, _, err := c.exchange(ctx, requestTimeout, http.MethodGet, pathOf("self"), nil, nil)
	if err != nil {
		return Self{}, err
	}
	answer := Self{Raw: content}
	return answer, c.decode(content, &answer)
}

// Policy returns the rules in force as the server sends them.
func (c *Client) Policy(ctx context.Context) (json.RawMessage, error) {
	content, _, err := c.exchange(ctx, requestTimeout, http.MethodGet, pathOf("policy"), nil, nil)
	return content, err
}

// SetPolicy replaces the rules, if the version in force still is base.
func (c *Client) SetPolicy(ctx context.Context, policy json.RawMessage, base int64) (json.RawMessage, error) {
	content, _, err := c.exchange(ctx, requestTimeout, http.MethodPut, pathOf("policy"), url.Values{"base_version": {strconv.FormatInt(base, 10)}}, policy)
	return content, err
}

// PolicyVersion is one version of the rules.
type PolicyVersion struct {
	Version int64     `json:"version"`
	Changed time.Time `json:"changed"`
	By      string    `json:"by"`
	Rules   int       `json:"rules"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (v *PolicyVersion) UnmarshalJSON(data []byte) error {
	type plain PolicyVersion
	return withRaw(data, (*plain)(v), &v.Raw)
}

// PolicyVersions returns the versions of the rules, newest first.
func (c *Client) PolicyVersions(ctx context.Context) iter.Seq2[PolicyVersion, error] {
	return list[PolicyVersion](ctx, c, pathOf("policy", "versions"), nil)
}

// Explanation is what would become of a call.
type Explanation struct {
	// Action is "allow", "confirm" or "deny"; Rule is what decides.
	Action string `json:"action"`
	Rule   string `json:"rule"`
	Detail string `json:"detail"`
	Steps  []struct {
		Rule    string `json:"rule"`
		Action  string `json:"action"`
		Verdict string `json:"verdict"`
		Why     string `json:"why"`
	} `json:"steps"`
	Shared bool   `json:"shared"`
	TTL    string `json:"ttl"`
	// Raw is the answer as received.
	Raw json.RawMessage `json:"-"`
}

// Explain says what would become of a call by this key; via and arguments may be empty.
func (c *Client) Explain(ctx context.Context, key, device, tool, via string, arguments json.RawMessage) (Explanation, error) {
	query := url.Values{"key": {key}, "device": {device}, "tool": {tool}}
	setIf(query, "via", via)
	setIf(query, "arguments", string(arguments))
	content, _, err := c.exchange(ctx, requestTimeout, http.MethodGet, pathOf("policy", "explain"), query, nil)
	if err != nil {
		return Explanation{}, err
	}
	x := Explanation{Raw: content}
	return x, c.decode(content, &x)
}

// AuditEntry is one entry of the record of who did what.
type AuditEntry struct {
	Run      string    `json:"run"`
	Node     string    `json:"node"`
	Seq      int64     `json:"seq"`
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"`
	Action   string    `json:"action"`
	Device   string    `json:"device"`
	Key      string    `json:"key"`
	Name     string    `json:"name"`
	Via      string    `json:"via"`
	From     string    `json:"from"`
	Outcome  string    `json:"outcome"`
	Rule     string    `json:"rule"`
	Detail   string    `json:"detail"`
	Duration int64     `json:"duration_ns"`
	Count    int64     `json:"count"`
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (e *AuditEntry) UnmarshalJSON(data []byte) error {
	type plain AuditEntry
	return withRaw(data, (*plain)(e), &e.Raw)
}

// AuditFilter selects entries; empty fields select all.
type AuditFilter struct {
	Since, Until                       time.Time
	Device, Key, Kind, Action, Outcome string
	// PageSize is how many come with one request, at most 1000; 0: that many.
	PageSize int
}

func (f AuditFilter) query() url.Values {
	query := make(url.Values)
	for name, at := range map[string]time.Time{"since": f.Since, "until": f.Until} {
		if !at.IsZero() {
			query.Set(name, at.UTC().Format(time.RFC3339Nano))
		}
	}
	setIf(query, "device", f.Device)
	setIf(query, "key", f.Key)
	setIf(query, "kind", f.Kind)
	setIf(query, "action", f.Action)
	setIf(query, "outcome", f.Outcome)
	if f.PageSize > 0 {
		query.Set("limit", strconv.Itoa(min(f.PageSize, 1000)))
	}
	return query
}

// Audit returns entries, newest first, page by page as they are consumed.
func (c *Client) Audit(ctx context.Context, filter AuditFilter) iter.Seq2[AuditEntry, error] {
	return list[AuditEntry](ctx, c, pathOf("audit"), filter.query())
}

// AuditReport is what a look for gaps found.
type AuditReport struct {
	Intact   bool     `json:"intact"`
	Runs     int      `json:"runs"`
	Blocks   int      `json:"blocks"`
	Entries  int64    `json:"entries"`
	Dropped  int64    `json:"dropped"`
	Headless int      `json:"headless"`
	Unended  []string `json:"unended"`
	Faults   []string `json:"faults"`
}

// VerifyAudit has the node look for gaps in the record.
func (c *Client) VerifyAudit(ctx context.Context, filter AuditFilter) (AuditReport, error) {
	var report AuditReport
	err := c.into(ctx, verifyTimeout, http.MethodGet, pathOf("audit", "verify"), filter.query(), nil, &report)
	return report, err
}

// verifyTimeout is for a walk over everything there is.
const verifyTimeout = time.Hour

// ExportAudit copies the record to w.
func (c *Client) ExportAudit(ctx context.Context, filter AuditFilter, w io.Writer) (int64, error) {
	return c.download(ctx, pathOf("audit", "export"), filter.query(), w)
}
