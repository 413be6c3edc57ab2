package vision

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// ChatOptions configure an OpenAI-compatible server that explains photos.
type ChatOptions struct {
	URL   string // to which /chat/completions is appended
	Model string // empty: the server's own
	Key   string // bearer token; empty: none
}

// chat is the explainer that uses an OpenAI-compatible server.
type chat struct {
	opt    ChatOptions
	client *http.Client
	photo  func(ctx context.Context, id string) ([]byte, error)
}

const (
	chatDial    = 5 * time.Second
	chatIdle    = time.Minute
	chatHeaders = 64 << 10 // bytes of a response's header
)

// noQuestion is used when the device sends no question.
const noQuestion = "What is in this picture?"

func newChat(opt ChatOptions, photo func(context.Context, string) ([]byte, error)) *chat {
	dialer := &net.Dialer{Timeout: chatDial}
	return &chat{opt: opt, photo: photo, client: &http.Client{
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, TLSHandshakeTimeout: chatDial, ForceAttemptHTTP2: true,
			MaxConnsPerHost: MaxExplaining + 1, MaxIdleConnsPerHost: MaxExplaining, IdleConnTimeout: chatIdle, MaxResponseHeaderBytes: chatHeaders},
		// The key and the picture must reach only the configured server.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// The parts of the protocol that are used (OpenAI's API reference, Chat Completions).
type (
	chatRequest struct {
		Model    string        `json:"model,omitempty"`
		Messages []chatMessage `json:"messages"`
	}
	chatMessage struct {
		Role    string     `json:"role"`
		Content []chatPart `json:"content"`
	}
	chatPart struct {
		Type     string     `json:"type"`
		Text     string     `json:"text,omitempty"`
		ImageURL *chatImage `json:"image_url,omitempty"`
	}
	chatImage struct {
		URL string `json:"url"`
	}
	chatReply struct {
		Choices []struct {
			Message struct {
				Content json.RawMessage `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
)

func (c *chat) explain(ctx context.Context, q question) (string, error) {
	jpeg, err := c.photo(ctx, q.photo)
	if err != nil {
		return "", err
	}
	body, err := json.Marshal(chatRequest{Model: c.opt.Model, Messages: []chatMessage{{Role: "user", Content: []chatPart{
		{Type: "text", Text: cmp.Or(strings.TrimSpace(q.text), noQuestion)},
		{Type: "image_url", ImageURL: &chatImage{"data:image/jpeg;base64," + base64.StdEncoding.EncodeToString(jpeg)}}}}}})
	if err != nil {
		return "", fmt.Errorf("encode the question: %w", err)
	}
	answer, err := c.send(ctx, http.MethodPost, "/chat/completions", string(body))
	if err != nil {
		return "", err
	}
	var reply chatReply
	if err := json.Unmarshal(answer, &reply); err != nil || len(reply.Choices) == 0 {
		return "", errors.New("the response of --vision-url is not a chat completion")
	}
	return textOf(reply.Choices[0].Message.Content), nil
}

// textOf returns the text of content, which is a text or a list of parts.
func textOf(content json.RawMessage) string {
	var text string
	if json.Unmarshal(content, &text) == nil {
		return text
	}
	var parts []chatPart
	if json.Unmarshal(content, &parts) != nil {
		return "" // no usable text
	}
	var all strings.Builder
	for _, p := range parts {
		all.WriteString(p.Text)
	}
	return all.String()
}

// send sends one request. Its errors contain neither the key nor the URL, which may contain
// one, nor any text of the server.
func (c *chat) send(ctx context.Context, method, path, body string) ([]byte, error) {
	u, err := url.Parse(c.opt.URL)
	if err != nil {
		return nil, errors.New("--vision-url is not a valid URL")
	}
	r, err := http.NewRequestWithContext(ctx, method, u.JoinPath(path).String(), strings.NewReader(body))
	if err != nil {
		return nil, errors.New("--vision-url is not a valid URL")
	}
	r.Header.Set("Content-Type", "application/json")
	if c.opt.Key != "" {
		r.Header.Set("Authorization", "Bearer "+c.opt.Key)
	}
	answer, err := c.client.Do(r)
	if err != nil {
		if fault, ok := errors.AsType[*url.Error](err); ok {
			err = fault.Err
		}
		return nil, fmt.Errorf("--vision-url does not answer: %w", err)
	}
	defer answer.Body.Close()
	switch status := answer.StatusCode; {
	case status == http.StatusOK:
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return nil, fmt.Errorf("--vision-url responds with %d: check --vision-key", status)
	case status == http.StatusNotFound:
		return nil, fmt.Errorf("--vision-url responds with %d: %w; check the URL, to which %s is appended, and --vision-model", status, errNoSuchPath, path)
	case status >= 300 && status < 400:
		return nil, fmt.Errorf("--vision-url responds with %d: redirects are not followed; configure the URL of the redirect", status)
	default:
		return nil, fmt.Errorf("--vision-url responds with %d", status)
	}
	content, err := io.ReadAll(io.LimitReader(answer.Body, maxReply+1))
	if err != nil {
		return nil, fmt.Errorf("the response of --vision-url is incomplete: %w", err)
	}
	if len(content) > maxReply {
		return nil, fmt.Errorf("the response of --vision-url has more than %d bytes", maxReply)
	}
	return content, nil
}

var errNoSuchPath = errors.New("not found")

// check requests the list of models, which is free of charge. A server without that list
// passes.
func (c *chat) check(ctx context.Context) error {
	if _, err := c.send(ctx, http.MethodGet, "/models", ""); err != nil && !errors.Is(err, errNoSuchPath) {
		return err
	}
	return nil
}
