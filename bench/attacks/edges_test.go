package attacks

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"fleetd/internal/api"
)

// edgeAttacks are those that once took the node's memory, or what the whole fleet has, with one limited key or without any.
var edgeAttacks = []attack{
	{"shares", "a quarter of what is free, for a key and its children", shares},
	{"fat-pages", "1 MiB of a page", fatPages},
	{"wide-headers", "1,000 labels of a file", wideHeaders},
	{"refused-bodies", "64 KiB/s, 10 s and 64 MiB after the refusal", refusedBodies},
	{"mcp-streams", "a stream is taken over with Last-Event-ID alone", mcpStreams},
	{"ota-others", "records of steps that prove nothing", otaOthers},
}

// shares lets one key, limited to some devices, take all that it can get, while the administrator needs a little of each.
func shares(a *attacker) {
	device := a.devices[6]
	taken := []struct{ path, body string }{
		{"/v1/jobs", `{"action":{"restart":{}},"select":"device=` + device + `","when":{"cron":"0 4 * * *"}}`},
		{"/v1/devices/" + device + "/tools/" + tool + "/call", `{"arguments":{"volume":50},"later":"24h"}`},
		{"/v1/webhooks", `{"url":"https://example.com/","types":["offline"]}`},
		{"/v1/devices/" + device + "/trace", `{}`},
	}
	var refused atomic.Bool
	go func() { // one of each at a time, which an operator does once in a while
		client := a.client(nil)
		for round := 0; a.ctx.Err() == nil; round++ {
			for i, of := range taken {
				outcome, body, _ := a.request(client, http.MethodPost, a.node.Info.API+of.path, strings.ReplaceAll(of.body, device, a.devices[7]),
					"Authorization", "Bearer "+a.token, "Content-Type", "application/json", "Idempotency-Key", fmt.Sprint("admin", round, i, time.Now().UnixNano()))
				if a.ctx.Err() == nil && !strings.HasPrefix(outcome, "20") && !refused.Swap(true) {
					a.Errorf("shares: the administrator's %s: %s, %.300s", of.path, outcome, body)
				}
				var made struct{ ID string }
				if of.path == "/v1/webhooks" && json.Unmarshal([]byte(body), &made) == nil && made.ID != "" { // it would follow the events from here on
					a.request(client, http.MethodDelete, a.node.Info.API+of.path+"/"+made.ID, "", "Authorization", "Bearer "+a.token)
				}
			}
			a.pause(5 * time.Second)
		}
	}()
	token := a.limitedKey(api.NewKey{Scopes: []string{"jobs", "jobs:read", "webhooks", "devices:read", "devices:write", "events:read", "tools:call"}, Devices: api.Selection{Text: "device=" + device}})
	clients := make([]*http.Client, keyWorkers)
	for i := range clients {
		clients[i] = a.client(source(13, i))
	}
	address, head := a.post(token, "/v1/devices/import")
	a.workers(len(clients), func(worker, round int) string {
		if worker < 4 { // places of imports, whose files drip
			return "import " + a.unread(address, source(13, worker), head+"Content-Type: text/csv\r\nContent-Length: 1000000\r\n\r\nid,")
		}
		of := taken[(worker+round)%len(taken)]
		return a.asKey(clients[worker], token, http.MethodPost, of.path, of.body, "Idempotency-Key", fmt.Sprint(worker, round, time.Now().UnixNano()))
	})
}

// limitedKey is the token of a new key.
func (a *attacker) limitedKey(k api.NewKey) string {
	a.member.Lock()
	defer a.member.Unlock()
	a.member.keys++
	k.Name = fmt.Sprintf("limited key %d", a.member.keys)
	made, err := a.node.CreateKey(a.ctx, k)
	if err != nil {
		a.Error(err)
		return ""
	}
	a.member.live = append(a.member.live, made.ID)
	return made.Token
}

// post is the head of a request with a body, without its last line.
func (a *attacker) post(token, path string) (address, request string) {
	u, err := url.Parse(a.node.Info.API)
	if err != nil {
		a.Error(err)
	}
	return u.Host, "POST " + path + " HTTP/1.1\r\nHost: " + u.Host + "\r\nAuthorization: Bearer " + token + "\r\n"
}

// fatPages lists jobs whose arguments and notes are as long as they may be.
func fatPages(a *attacker) {
	token := a.key("attacks", "jobs", "jobs:read", "tools:call", "devices:read")
	later := time.Now().Add(20 * time.Hour).UTC().Format(time.RFC3339)
	client := a.client(source(14, 0))
	for n := range 200 {
		body := `{"action":{"call":{"tool":"` + tool + `","arguments":{"volume":50,"x":"` + strings.Repeat("a", 60_000) + `"}}},"select":"device=` + a.devices[8] + `","when":{"at":"` + later + `"}}`
		if outcome := a.asKey(client, token, http.MethodPost, "/v1/jobs", body, "Idempotency-Key", fmt.Sprint("fat", n)); outcome != "201" {
			a.note("create " + outcome)
			a.pause(20 * time.Millisecond)
		}
	}
	a.keyed([]string{"jobs:read", "devices:read"}, func(client *http.Client, token string, _ int) string {
		return a.asKey(client, token, http.MethodGet, "/v1/jobs?limit=1000", "")
	})
}

// wideHeaders imports files whose first line has more columns than there are labels.
func wideHeaders(a *attacker) {
	var file bytes.Buffer
	file.WriteString("id")
	for i := range 23_578 {
		fmt.Fprintf(&file, ",label.l%d", i)
	}
	file.WriteString("\n")
	a.keyed([]string{"devices:write", "devices:read"}, func(client *http.Client, token string, _ int) string {
		outcome, _, _ := a.request(client, http.MethodPost, a.node.Info.API+"/v1/devices/import", file.String(), "Authorization", "Bearer "+token, "Content-Type", "text/csv")
		return outcome
	})
}

// refusedBodies sends large bodies without credentials.
func refusedBodies(a *attacker) {
	body := strings.Repeat("a", 32<<20)
	clients := make([]*http.Client, keyWorkers)
	for i := range clients {
		clients[i] = a.client(source(15, i))
	}
	a.workers(len(clients), func(worker, round int) string {
		path := []string{a.node.Info.API + "/v1/devices/import", a.node.Info.API + "/mcp", "http://" + a.device + "/xiaozhi/vision/explain"}[round%3]
		outcome, _, _ := a.request(clients[worker], http.MethodPost, path, body, "Content-Type", "application/json")
		return outcome
	})
}

// mcpStreams opens one stream after the other in the same session, as a host does that takes an error for a cut.
func mcpStreams(a *attacker) {
	token := a.key("attacks", "devices:read", "tools:call", "events:read")
	headers := []string{"Authorization", "Bearer " + token, "Content-Type", "application/json", "Accept", "application/json, text/event-stream"}
	_, _, header := a.request(a.client(source(16, 0)), http.MethodPost, a.node.Info.API+"/mcp",
		`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`, headers...)
	session := header.Get("Mcp-Session-Id")
	address, head := a.head(token, "/mcp")
	head = strings.TrimSuffix(head, "\r\n") + "Accept: text/event-stream\r\nMcp-Session-Id: " + session + "\r\n"
	a.workers(100, func(worker, round int) string {
		last := ""
		if round%2 == 1 {
			last = "Last-Event-ID: 0\r\n"
		}
		return a.unread(address, source(16, worker), head+last+"\r\n")
	})
}

// otaOthers makes checks in the name of the devices that are called.
func otaOthers(a *attacker) {
	clients := make([]*http.Client, 64)
	for i := range clients {
		clients[i] = a.client(source(17, i))
	}
	a.workers(len(clients), func(worker, round int) string {
		outcome, _, _ := a.request(clients[worker], http.MethodPost, "http://"+a.device+otaPath, `{}`,
			"Device-Id", a.devices[(worker+round)%len(a.devices)], "Client-Id", "somebody else", "Content-Type", "application/json")
		return outcome
	})
}

// http2Preface is how a client of HTTP/2 begins (RFC 9113, 3.4), with SETTINGS_INITIAL_WINDOW_SIZE of 0.
const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\x00\x00\x06\x04\x00\x00\x00\x00\x00" + "\x00\x04\x00\x00\x00\x00"

// streamsAlone speaks HTTP/2 and nothing else: with a window of 0 and many streams, if it finds anybody who answers.
func streamsAlone(a *attacker) {
	u, err := url.Parse(a.node.Info.API)
	if err != nil {
		a.Error(err)
		return
	}
	a.workers(keyWorkers, func(worker, _ int) string {
		c, err := a.dial(u.Host, source(18, worker))
		if err != nil {
			return failure(err)
		}
		defer func() { _ = c.Close() }()
		if worker%2 == 0 {
			secured := tls.Client(c, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
			if err := secured.HandshakeContext(a.ctx); err != nil {
				return "handshake refused"
			}
			c = secured
		}
		if _, err := io.WriteString(c, http2Preface); err != nil {
			return failure(err)
		}
		frame := make([]byte, 9)
		if _, err := io.ReadFull(c, frame); err == nil && frame[3] == 4 { // SETTINGS
			a.Error("h2-alone: the node speaks HTTP/2")
			return "HTTP/2"
		}
		return "closed"
	})
}
