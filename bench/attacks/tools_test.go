package attacks

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"fleetd/simulator/firmware"
)

// attacks are those on a node without TLS, tlsAttacks those on one whose API speaks it.
var (
	attacks    = slicesOf(anonymousAttacks, memberAttacks, keyAttacks, edgeAttacks)
	tlsAttacks = []attack{
		{"tls-handshakes", "handshakes compute on a quarter of the threads", handshakes},
		{"tls-silent", "the same", silentTLS},
		{"h2-alone", "HTTP/1.1 alone", streamsAlone},
	}
)

func slicesOf(lists ...[]attack) (all []attack) {
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}

// source is an address of this machine that belongs to attackers.
func source(network, host int) net.IP { return net.IPv4(127, 0, byte(100+network), byte(1+host%250)) }

// dial connects from an address; nil: any.
func (a *attacker) dial(address string, from net.IP) (net.Conn, error) {
	d := net.Dialer{Timeout: 5 * time.Second}
	if from != nil {
		d.LocalAddr = &net.TCPAddr{IP: from}
	}
	c, err := d.DialContext(a.ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(a.ctx, func() { _ = c.Close() })
	return c, nil
}

// client makes requests from an address, with a connection that stays.
func (a *attacker) client(from net.IP) *http.Client {
	transport := &http.Transport{DialContext: func(_ context.Context, _, address string) (net.Conn, error) { return a.dial(address, from) },
		MaxIdleConnsPerHost: 1, DisableCompression: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	context.AfterFunc(a.ctx, transport.CloseIdleConnections)
	return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// request makes a request and reads its answer. headers are names and values.
func (a *attacker) request(client *http.Client, method, address, body string, headers ...string) (outcome string, response []byte, header http.Header) {
	r, err := http.NewRequestWithContext(a.ctx, method, address, strings.NewReader(body))
	if err != nil {
		a.Error(err)
		return err.Error(), nil, nil
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	answer, err := client.Do(r)
	if err != nil {
		return failure(err), nil, nil
	}
	defer func() { _ = answer.Body.Close() }()
	response, err = io.ReadAll(answer.Body)
	if err != nil {
		return failure(err), nil, nil
	}
	return fmt.Sprint(answer.StatusCode), response, answer.Header
}

// failure is an error without its addresses.
func failure(err error) string {
	var timeout net.Error
	switch text := err.Error(); {
	case errors.As(err, &timeout) && timeout.Timeout():
		return "timeout"
	case strings.Contains(text, "reset"), strings.Contains(text, "EOF"), strings.Contains(text, "broken pipe"), strings.Contains(text, "closed"):
		return "closed"
	default:
		return text[strings.LastIndex(text, ": ")+1:]
	}
}

// asKey makes requests with an API key.
func (a *attacker) asKey(client *http.Client, token, method, path, body string, headers ...string) string {
	outcome, _, _ := a.request(client, method, a.node.Info.API+path, body, append(headers, "Authorization", "Bearer "+token, "Content-Type", "application/json")...)
	return outcome
}

const otaPath = "/xiaozhi/ota/"

// checkIn makes the OTA check of a device.
func (a *attacker) checkIn(client *http.Client, id string, headers ...string) (outcome string, login firmware.Login) {
	outcome, body, _ := a.request(client, http.MethodPost, "http://"+a.device+otaPath, `{"application":{"version":"2.4.2"}}`,
		append(headers, "Device-Id", id, "Client-Id", clientOf(id), "User-Agent", "bread-compact-wifi/2.4.2", "Content-Type", "application/json")...)
	if outcome == "200" {
		read, err := new(firmware.Flash).ReadReply(body, "2.4.2")
		if err != nil {
			return err.Error(), login
		}
		login = read.Login
		login.Device, login.Client = id, clientOf(id)
	}
	return outcome, login
}

func clientOf(id string) string { return "client-of-" + strings.ReplaceAll(id, ":", "") }

// enlist makes an attacker's device a member.
func (a *attacker) enlist(transport string) (firmware.Login, error) {
	a.member.Lock()
	a.member.next++
	n := a.member.next
	a.member.Unlock()
	id := fmt.Sprintf("02:bb:00:00:%02x:%02x", n>>8, n&255)
	client := a.client(source(9, n))
	address := "http://" + a.device + otaPath
	if transport == "websocket" {
		address += "ws/"
	}
	outcome, body, _ := a.request(client, http.MethodPost, address, `{"application":{"version":"2.4.2"}}`,
		"Device-Id", id, "Client-Id", clientOf(id), "User-Agent", "bread-compact-wifi/2.4.2", "Content-Type", "application/json")
	if outcome != "200" {
		return firmware.Login{}, fmt.Errorf("OTA check of %s: %s %s", id, outcome, body)
	}
	read, err := new(firmware.Flash).ReadReply(body, "2.4.2")
	read.Login.Device, read.Login.Client = id, clientOf(id)
	return read.Login, err
}

// lines lets members of a transport do something over connections of their own until the attack ends. A member that is
// closed comes back at once.
func (a *attacker) lines(n int, transport string, do func(line *firmware.Line, round int) error) {
	logins := make([]firmware.Login, n)
	for i := range logins {
		var err error
		if logins[i], err = a.enlist(transport); err != nil {
			a.note(err.Error())
			return
		}
	}
	a.workers(n, func(worker, _ int) string {
		c, err := a.dial(addressOf(logins[worker]), source(9, worker))
		if err != nil {
			return "dial: " + failure(err)
		}
		line, err := logins[worker].Open(a.ctx, c)
		if err != nil {
			a.pause(50 * time.Millisecond)
			return "refused"
		}
		defer line.Close()
		_ = c.SetDeadline(time.Time{})
		if transport == "websocket" {
			_ = line.Send([]byte(hello))
		}
		go func() {
			for {
				if _, err := line.Receive(); err != nil {
					line.Close()
					return
				}
			}
		}()
		for round := 0; a.ctx.Err() == nil; round++ {
			if err := do(line, round); err != nil {
				return "closed"
			}
			a.note("sent")
		}
		return "end"
	})
}

const hello = `{"type":"hello","version":1,"features":{"mcp":true},"transport":"websocket","audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`

func addressOf(l firmware.Login) string {
	if l.URL != "" {
		u, err := url.Parse(l.URL)
		if err == nil {
			return u.Host
		}
	}
	return l.Endpoint
}

// unread sends a request and never reads the answer, over a connection with a small buffer, until the server closes it.
func (a *attacker) unread(address string, from net.IP, request string) string {
	c, err := a.dial(address, from)
	if err != nil {
		return "dial: " + failure(err)
	}
	defer func() { _ = c.Close() }()
	if tcp, is := c.(*net.TCPConn); is {
		_ = tcp.SetReadBuffer(4 << 10)
	}
	if _, err := io.WriteString(c, request); err != nil {
		return failure(err)
	}
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return "held"
		case <-ticker.C:
			if ended(c) {
				return "ended by the node"
			}
		}
	}
}

// ended reports whether the other side has closed a connection, without reading what it sent: a write then fails.
func ended(c net.Conn) bool {
	_, err := c.Write([]byte("\r\n"))
	return err != nil
}

// upgrade opens a WebSocket by hand, for frames that no firmware sends.
func (a *attacker) upgrade(l firmware.Login, from net.IP) (net.Conn, error) {
	u, err := url.Parse(l.URL)
	if err != nil {
		return nil, err
	}
	c, err := a.dial(u.Host, from)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"+
		"Authorization: Bearer %s\r\nProtocol-Version: 1\r\nDevice-Id: %s\r\nClient-Id: %s\r\n\r\n", u.RequestURI(), u.Host, l.Token, l.Device, l.Client)
	answer, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil && answer.StatusCode != http.StatusSwitchingProtocols {
		err = fmt.Errorf("refused with %d", answer.StatusCode)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	_, err = c.Write(frame(0x81, []byte(hello)))
	return c, err
}

// frame is a masked WebSocket frame.
func frame(first byte, payload []byte) []byte {
	b := []byte{first}
	if len(payload) < 126 {
		b = append(b, 0x80|byte(len(payload)))
	} else {
		b = append(b, 0x80|126, byte(len(payload)>>8), byte(len(payload)))
	}
	return append(append(b, 0, 0, 0, 0), payload...) // a mask of zeros
}

// handshakes opens TLS connections without a request.
func handshakes(a *attacker) {
	address := strings.TrimPrefix(a.node.Info.API, "https://")
	a.workers(32, func(worker, round int) string {
		c, err := a.dial(address, source(1, worker))
		if err != nil {
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if err := tls.Client(c, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(a.ctx); err != nil {
			return failure(err)
		}
		return "handshake"
	})
}

// silentTLS opens connections and sends the beginning of a handshake.
func silentTLS(a *attacker) {
	address := strings.TrimPrefix(a.node.Info.API, "https://")
	a.workers(300, func(worker, _ int) string {
		c, err := a.dial(address, source(1, worker))
		if err != nil {
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		_, _ = c.Write([]byte{22, 3, 1, 2, 0, 1})
		_, err = io.Copy(io.Discard, c)
		return "ended " + failureOf(err)
	})
}

func failureOf(err error) string {
	if err == nil {
		return "closed"
	}
	return failure(err)
}

// evilJSON are documents that are hard to read, small enough to be read at all.
var evilJSON = [][]byte{
	[]byte(`{"type":"mcp","payload":` + strings.Repeat("[", 4000) + strings.Repeat("]", 4000) + `}`),
	[]byte(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":` + strings.Repeat("9", 6000) + `,"result":{}}}`),
	[]byte(`{` + strings.Repeat(`"type":"mcp",`, 600) + `"type":"x"}`),
	[]byte(`{"type":"` + strings.Repeat(`\ud800`, 1200) + `"}`),
	[]byte(`{"type":"listen","state":"` + strings.Repeat(`\u0000`, 1200) + `"}`),
	bytes.Repeat([]byte(`{"a":`), 1600),
	[]byte(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/x","params":{` + strings.Repeat(`"k":[{},{}],`, 500) + `"z":0}}}`),
	[]byte(`{"type":"mcp","payload":{"jsonrpc":"2.0","id":77,"result":{"content":[` + strings.Repeat(`{"type":"text","text":"x"},`, 250) + `{}]}}}`),
}
