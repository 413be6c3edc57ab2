package apiclient

import (
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"fleetd/internal/api"
)

// Key is an API key.
type Key struct {
	api.Key
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Key) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Key, &x.Raw) }

// CreateKey makes a key; its Token is shown this once.
func (c *Client) CreateKey(ctx context.Context, params api.NewKey) (api.CreatedKey, error) {
	var k api.CreatedKey
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("keys"), nil, params, &k)
	return k, err
}

// CreateConsoleCode makes a one-time code of the console.
func (c *Client) CreateConsoleCode(ctx context.Context, params api.NewConsoleCode) (api.ConsoleCode, error) {
	var code api.ConsoleCode
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("console", "codes"), nil, params, &code)
	return code, err
}

// CreateConsoleKey exchanges a one-time code for a key; the client needs no token.
func (c *Client) CreateConsoleKey(ctx context.Context, code string) (api.CreatedKey, error) {
	var k api.CreatedKey
	err := c.into(ctx, requestTimeout, http.MethodPost, pathOf("console", "keys"), nil, api.ConsoleLogin{Code: code}, &k)
	return k, err
}

// Keys returns all keys, oldest first.
func (c *Client) Keys(ctx context.Context) iter.Seq2[Key, error] {
	return list[Key](ctx, c, pathOf("keys"), nil)
}

// RevokeKey ends a key, given by id or name.
func (c *Client) RevokeKey(ctx context.Context, key string) (api.Revocation, error) {
	return c.revoke(ctx, http.MethodDelete, pathOf("keys", key))
}

// Self is the caller, and what it may do.
type Self struct {
	api.Self
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Self) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Self, &x.Raw) }

// Self returns who the token of this client belongs to, and what it may do.
func (c *Client) Self(ctx context.Context) (Self, error) {
	var answer Self
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("self"), nil, nil, &answer)
	return answer, err
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
	api.PolicyVersion
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *PolicyVersion) UnmarshalJSON(data []byte) error {
	return withRaw(data, &x.PolicyVersion, &x.Raw)
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

// Explain returns the decision on a call by this key; via and arguments may be empty.
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

// AuditEntry is one entry of the audit.
type AuditEntry struct {
	api.AuditEntry
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *AuditEntry) UnmarshalJSON(data []byte) error { return withRaw(data, &x.AuditEntry, &x.Raw) }

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

// VerifyAudit has the node look for gaps in the record.
func (c *Client) VerifyAudit(ctx context.Context, filter AuditFilter) (api.AuditReport, error) {
	var report api.AuditReport
	err := c.into(ctx, verifyTimeout, http.MethodGet, pathOf("audit", "verify"), filter.query(), nil, &report)
	return report, err
}

// verifyTimeout is for a walk over everything there is.
const verifyTimeout = time.Hour

// ExportAudit copies the record to w.
func (c *Client) ExportAudit(ctx context.Context, filter AuditFilter, w io.Writer) (int64, error) {
	return c.download(ctx, pathOf("audit", "export"), filter.query(), w)
}
