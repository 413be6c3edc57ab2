// Package apiclient speaks the REST side of a fleetd node: JSON over HTTP under /v1, server-sent events, and errors as
// RFC 9457 problems. It is what the command line uses, and depends on nothing of the server but the types of internal/api: a member the
// server adds later is kept in the Raw bytes of an answer and otherwise ignored.
package apiclient

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"fleetd/internal/api"
)

const (
	// requestTimeout bounds every request but calls and events.
	requestTimeout = 30 * time.Second
	// BulkTimeout bounds what goes over the whole fleet or the whole record.
	BulkTimeout = time.Hour
	// LongestCall is what the server allows one call to take, waiting included.
	LongestCall = 300 * time.Second
	// answerSlack is what the network may add to the time given to a call: the server's answer that a call timed
	// out has more detail than the client's own.
	answerSlack = 15 * time.Second
	// maxAnswer bounds an answer held in memory; photos are streamed and do not count.
	maxAnswer = 64 << 20
)

// ErrNoNode means that there is no running node where one was looked for.
var ErrNoNode = errors.New("no running node")

// Client calls one node. It is safe for concurrent use.
type Client struct {
	base  string // scheme://host[:port][/path], without a trailing slash
	token string
	http  *http.Client
	// local is the data directory the address came from, empty if the user gave it.
	local string
}

// New returns a client of the node whose internal side is at baseURL, such as "http://127.0.0.1:8080", or with the path /mcp
// that hosts of language models are given. An empty token sends none.
func New(baseURL, token string) (*Client, error) {
	u, err := url.Parse(baseURL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("the address of the API must be a URL such as http://127.0.0.1:8080, without user, query or fragment")
	}
	base := strings.TrimSuffix(strings.TrimRight(u.String(), "/"), "/mcp")
	return &Client{base: strings.TrimRight(base, "/"), token: token, http: &http.Client{}}, nil
}

// Base returns the URL the client calls, without a trailing slash.
func (c *Client) Base() string { return c.base }

// upload is a request body that is sent as it is.
type upload struct {
	io.Reader
	contentType string
	size        int64 // -1: unknown
}

// Query has the parameters of a request; those that are empty are not sent.
type Query map[string]string

func (q Query) encode() string {
	values := make(url.Values)
	for name, value := range q {
		if value != "" {
			values.Set(name, value)
		}
	}
	if len(values) == 0 {
		return ""
	}
	return "?" + values.Encode()
}

// do sends a request and returns the answer to a 2xx status; every other status becomes a [*Problem]. The body is sent
// as JSON, unless it is an upload. The caller closes the answer's body.
func (c *Client) do(ctx context.Context, method, path string, query Query, body any, header http.Header) (*http.Response, error) {
	var content io.Reader
	var contentType string
	file, isUpload := body.(upload)
	switch {
	case isUpload:
		content, contentType = file.Reader, file.contentType
	case body != nil:
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		content, contentType = bytes.NewReader(encoded), "application/json"
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path+query.encode(), content)
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	if isUpload {
		req.ContentLength = file.size
		// A server that refuses the request does so before the file is on its way.
		req.Header.Set("Expect", "100-continue")
	}
	for name, values := range header {
		req.Header[name] = values
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		defer resp.Body.Close()
		return nil, c.readProblem(resp)
	}
	return resp, nil
}

// readProblem reads an answer that is not a success. It names the source of a token that was refused.
func (c *Client) readProblem(resp *http.Response) *Problem {
	p := readProblem(resp)
	switch {
	case resp.StatusCode != http.StatusUnauthorized || c.local != "":
	case c.token == "":
		p.Detail = cmp.Or(p.Detail, p.Title, http.StatusText(p.Status)) + "; this command has no token: give one with --token or FLEETD_TOKEN"
	default:
		p.Detail = cmp.Or(p.Detail, p.Title, http.StatusText(p.Status)) + "; this command sent the token of --token or FLEETD_TOKEN"
	}
	return p
}

// unreachable words a failure to get any answer.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); errors.Is(cause, context.DeadlineExceeded) {
		return lateError{c.base, cause}
	} else if cause != nil {
		return fmt.Errorf("%s did not answer: %w", c.base, cause)
	}
	if c.local != "" && errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w found in %s: the one that ran there does not answer at %s any more; start one with `fleetd serve`, or give --api URL and --token",
			ErrNoNode, c.local, c.base)
	}
	// The sentence contains the URL; what http wraps around the cause would repeat it.
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		err = fmt.Errorf("%w; if a private authority signed the certificate, name a file with the authority's certificate in SSL_CERT_FILE", err)
	}
	return fmt.Errorf("cannot reach the API at %s: %w", c.base, err)
}

// lateError is a deadline that passed without an answer.
type lateError struct {
	base  string
	cause error
}

func (e lateError) Error() string { return e.base + " did not answer in time; its log may say why" }
func (e lateError) Unwrap() error { return e.cause }

// readAll reads and closes an answer.
func (c *Client) readAll(resp *http.Response) ([]byte, error) {
	defer resp.Body.Close()
	content, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, fmt.Errorf("the answer of %s broke off: %w", c.base, err)
	}
	if len(content) > maxAnswer {
		return nil, fmt.Errorf("the answer of %s to %s %s is over %d MiB", c.base, resp.Request.Method, resp.Request.URL.Path, maxAnswer>>20)
	}
	return content, nil
}

// Answer is a value with the JSON from which it was decoded, which also has the members that a newer server added.
type Answer[T any] struct {
	Value T
	Raw   json.RawMessage
}

// UnmarshalJSON implements json.Unmarshaler.
func (x *Answer[T]) UnmarshalJSON(data []byte) error {
	x.Raw = bytes.Clone(data)
	return json.Unmarshal(data, &x.Value)
}

// Request is a request of the API.
type Request struct {
	Method  string   // GET if it is empty
	Path    []string // elements below /v1
	Query   Query
	Header  http.Header
	Body    any           // sent as JSON, unless it is nil
	Timeout time.Duration // 30 s if it is 0
}

// send sends a request, and decodes the answer into the target, if both are there. It returns the answer's header.
func (c *Client) send(ctx context.Context, r Request, target any) (http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(r.Timeout, requestTimeout))
	defer cancel()
	resp, err := c.do(ctx, cmp.Or(r.Method, http.MethodGet), pathOf(r.Path...), r.Query, r.Body, r.Header)
	if err != nil {
		return nil, err
	}
	content, err := c.readAll(resp)
	if err == nil && target != nil && resp.StatusCode != http.StatusNoContent {
		err = c.decode(content, target)
	}
	return resp.Header, err
}

// Do sends a request with a body that may be nil, and drops the answer.
func (c *Client) Do(ctx context.Context, method string, body any, path ...string) error {
	_, err := c.send(ctx, Request{Method: method, Body: body, Path: path}, nil)
	return err
}

// Send sends a request and returns the answer.
func Send[T any](ctx context.Context, c *Client, r Request) (answer T, err error) {
	if _, err = c.send(ctx, r, &answer); err != nil {
		return *new(T), err // not what was decoded before the fault
	}
	return answer, nil
}

// Get returns what is at a path.
func Get[T any](ctx context.Context, c *Client, query Query, path ...string) (T, error) {
	return Send[T](ctx, c, Request{Query: query, Path: path})
}

func (c *Client) decode(content []byte, target any) error {
	if err := json.Unmarshal(content, target); err != nil {
		return fmt.Errorf("%s answered something else than fleetd's JSON (is it the API of a fleetd node?): %w", c.base, err)
	}
	return nil
}

// List returns the elements of a list, page by page as they are consumed. The last element is an error if a page could
// not be had.
func List[T any](ctx context.Context, c *Client, query Query, path ...string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for page, err := range Pages[api.List[T]](ctx, c, func(page api.List[T]) string { return page.NextCursor }, query, path...) {
			for _, item := range page.Items {
				if !yield(item, nil) {
					return
				}
			}
			if err != nil {
				yield(*new(T), err)
			}
		}
	}
}

// Pages returns the pages at a path, each with the cursor of the next one.
func Pages[T any](ctx context.Context, c *Client, next func(T) string, query Query, path ...string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		query := maps.Clone(query)
		if query == nil {
			query = Query{}
		}
		query["limit"] = cmp.Or(query["limit"], "1000")
		for {
			page, err := Get[T](ctx, c, query, path...)
			cursor := next(page)
			if err == nil && cursor != "" && cursor == query["cursor"] {
				err = fmt.Errorf("%s sent the same page of %s twice", c.base, pathOf(path...))
			}
			if !yield(page, err) || err != nil || cursor == "" {
				return
			}
			query["cursor"] = cursor
		}
	}
}

func pathOf(elements ...string) string {
	var path strings.Builder
	path.WriteString("/v1")
	for _, element := range elements {
		path.WriteString("/" + url.PathEscape(element))
	}
	return path.String()
}

// Download copies the content of a path to w, and returns how many bytes it has.
func (c *Client) Download(ctx context.Context, w io.Writer, query Query, path ...string) (int64, error) {
	resp, err := c.do(ctx, http.MethodGet, pathOf(path...), query, nil, nil)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	n, err := io.Copy(w, resp.Body)
	if err != nil {
		return n, fmt.Errorf("%s broke off after %d bytes: %w", pathOf(path...), n, err)
	}
	return n, nil
}

// Collect gathers a list, stopping at its first error.
func Collect[T any](items iter.Seq2[T, error]) ([]T, error) {
	var all []T
	for item, err := range items {
		if err != nil {
			return nil, err
		}
		all = append(all, item)
	}
	return all, nil
}
