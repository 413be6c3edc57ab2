package attacks

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"fleetd/simulator/firmware"
)

// anonymousAttacks need no credentials.
var anonymousAttacks = []attack{
	{"ota-many", "`--new-members-per-address`, `--ota-rate`", otaMany},
	{"ota-ipv6", "the same, by /64", otaIPv6},
	{"wrong-tokens", "20 failures of an address, then one in 10 s", wrongTokens},
	{"forwarded", "the same, of the address that the proxy names", forwarded},
	{"slow-bodies", "10 s, then 2 KiB/s", slowBodies},
	{"mqtt-silent", "5 s until CONNECT; 16,384 connections", silentMQTT},
	{"public-pages", "20 requests a second and connection", publicPages},
	{"connections", "`--connections-per-address`", connections},
	{"udp-forged", "keys of channels", forgedUDP},
}

func randomID() string {
	n := rand.Uint32()
	return fmt.Sprintf("06:dd:%02x:%02x:%02x:%02x", n>>24, n>>16&255, n>>8&255, n&255)
}

// otaMany invents devices, from 64 addresses.
func otaMany(a *attacker) {
	clients := make([]*http.Client, 64)
	for i := range clients {
		clients[i] = a.client(source(2, i))
	}
	a.workers(len(clients), func(worker, _ int) string {
		outcome, _ := a.checkIn(clients[worker], randomID())
		return outcome
	})
}

// ipv6Prefix is for documentation (RFC 3849), so that no other machine has it.
const ipv6Prefix = "2001:db8:66:1::"

// otaIPv6 does the same from ever new addresses of one /64, with a connection for each request.
func otaIPv6(a *attacker) {
	route := []string{"-6", "route", "replace", "local", ipv6Prefix + "/64", "dev", "lo"}
	if err := exec.CommandContext(a.ctx, "ip", route...).Run(); err != nil {
		a.Logf("  ota-ipv6 NOT RUN: addresses of a /64 need the right to add a route: %v", err)
		<-a.ctx.Done()
		return
	}
	defer func() {
		route[2] = "del"
		_ = exec.Command("ip", route...).Run() // it goes with the machine's next start
	}()
	_, port, _ := net.SplitHostPort(a.device)
	dialer := func(from net.IP) *net.Dialer {
		return &net.Dialer{Timeout: 5 * time.Second, LocalAddr: &net.TCPAddr{IP: from}, Control: func(_, _ string, c syscall.RawConn) error {
			var set error
			err := c.Control(func(fd uintptr) { set = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IPV6, ipv6FreeBind, 1) })
			if set != nil {
				return set
			}
			return err
		}}
	}
	a.workers(32, func(_, round int) string {
		from := net.ParseIP(fmt.Sprintf("%s%x:%x", ipv6Prefix, 1+rand.IntN(65000), 1+rand.IntN(65000)))
		c, err := dialer(from).DialContext(a.ctx, "tcp", net.JoinHostPort(ipv6Prefix+"1", port))
		if err != nil {
			a.pause(10 * time.Millisecond)
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		defer context.AfterFunc(a.ctx, func() { _ = c.Close() })()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: x\r\nDevice-Id: %s\r\nClient-Id: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", otaPath, randomID())
		return status(c)
	})
}

// ipv6FreeBind is IPV6_FREEBIND of Linux: bind to an address that no interface has.
const ipv6FreeBind = 78

// status is the status of the answer on a connection, which is read to its end.
func status(c net.Conn) string {
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	text, err := io.ReadAll(c)
	if len(text) < len("HTTP/1.1 200") {
		return "no answer: " + failureOf(err)
	}
	return string(text[len("HTTP/1.1 "):len("HTTP/1.1 200")])
}

// wrongTokens guesses at every interface that takes a token, from 60 addresses.
func wrongTokens(a *attacker) {
	const guess = "Bearer fld_0000000000000000000000000000000000000000"
	clients := make([]*http.Client, 60)
	for i := range clients {
		clients[i] = a.client(source(3, i))
	}
	a.workers(len(clients), func(worker, round int) string {
		client := clients[worker]
		switch round % 5 {
		case 0:
			outcome, _, _ := a.request(client, http.MethodGet, a.node.Info.API+"/v1/devices", "", "Authorization", guess)
			return "api " + outcome
		case 1:
			outcome, _, _ := a.request(client, http.MethodPost, a.node.Info.API+"/mcp", "{}", "Authorization", guess)
			return "mcp " + outcome
		case 2:
			outcome, _, _ := a.request(client, http.MethodPost, "http://"+a.gateway+"/api/devices/status", "{}", "Authorization", guess)
			return "gateway " + outcome
		case 3:
			outcome, _, _ := a.request(client, http.MethodGet, "http://"+a.device+"/xiaozhi/v1/", "", "Authorization", guess, "Device-Id", a.devices[0], "Client-Id", "x",
				"Upgrade", "websocket", "Connection", "Upgrade", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
			return "websocket " + outcome
		}
		c, err := a.dial(a.mqtt, source(3, worker))
		if err != nil {
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		id := strings.ReplaceAll(a.devices[0], ":", "")
		_, _ = c.Write(firmware.Login{ClientID: id, Username: "client:x", Password: "guess", Keepalive: 60}.Connect())
		_, err = io.Copy(io.Discard, c)
		return "mqtt " + failureOf(err)
	})
}

// forwarded sends requests through a trusted proxy that names ever new clients, and others that forge the header.
func forwarded(a *attacker) {
	clients := make([]*http.Client, 32)
	for i := range clients {
		from := net.ParseIP(trustedProxy)
		if i%2 == 1 {
			from = source(4, i)
		}
		clients[i] = a.client(from)
	}
	a.workers(len(clients), func(worker, round int) string {
		client, named := clients[worker], fmt.Sprintf("203.%d.%d.%d", rand.IntN(250), rand.IntN(250), 1+rand.IntN(250))
		switch round % 3 {
		case 0:
			outcome, _, _ := a.request(client, http.MethodGet, a.node.Info.API+"/v1/devices", "", "Authorization", "Bearer guess", "X-Forwarded-For", named)
			return "api " + outcome
		case 1:
			outcome, _ := a.checkIn(client, randomID(), "X-Forwarded-For", named)
			return "ota " + outcome
		}
		outcome, _ := a.checkIn(client, randomID(), "X-Forwarded-For", strings.Repeat("x,", 2000)+named)
		return "long " + outcome
	})
}

// slowBodies announces bodies and sends a byte now and then.
func slowBodies(a *attacker) {
	requests := []struct{ address, path string }{
		{strings.TrimPrefix(a.node.Info.API, "http://"), "/v1/devices/rotate"}, {a.device, otaPath}, {a.gateway, "/api/devices/status"}, {a.device, "/xiaozhi/vision/explain"},
	}
	a.workers(400, func(worker, round int) string {
		r := requests[(worker+round)%len(requests)]
		c, err := a.dial(r.address, source(5, worker))
		if err != nil {
			a.pause(100 * time.Millisecond)
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: localhost\r\nDevice-Id: %s\r\nClient-Id: x\r\nContent-Type: application/json\r\nContent-Length: 8000\r\n\r\n", r.path, randomID())
		for a.ctx.Err() == nil {
			if _, err := c.Write([]byte{' '}); err != nil {
				return "ended"
			}
			a.pause(500 * time.Millisecond)
		}
		return "held"
	})
}

// silentMQTT opens connections that send nothing, from five addresses.
func silentMQTT(a *attacker) {
	a.workers(2000, func(worker, round int) string {
		c, err := a.dial(a.mqtt, source(6, worker%5))
		if err != nil {
			a.pause(100 * time.Millisecond)
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		_, err = io.Copy(io.Discard, c)
		return "ended " + failureOf(err)
	})
}

// publicPages requests what needs no token.
func publicPages(a *attacker) {
	clients := make([]*http.Client, 64)
	for i := range clients {
		clients[i] = a.client(source(7, i))
	}
	a.workers(len(clients), func(worker, round int) string {
		path := []string{"/livez", "/metrics", "/docs", "/openapi.json", "/readyz"}[round%5]
		outcome, _, _ := a.request(clients[worker], http.MethodGet, a.node.Info.API+path, "")
		return path + " " + outcome
	})
}

// connections connects to every port, sends a request and goes.
func connections(a *attacker) {
	addresses := []string{strings.TrimPrefix(a.node.Info.API, "http://"), a.device, a.gateway, a.mqtt}
	a.workers(32, func(worker, round int) string {
		c, err := a.dial(addresses[round%len(addresses)], source(8, worker))
		if err != nil {
			a.pause(10 * time.Millisecond)
			return "dial: " + failure(err)
		}
		defer func() { _ = c.Close() }()
		if round%len(addresses) == 3 {
			_, _ = c.Write([]byte{0x10, 0x02, 0, 0})
			_, err := io.Copy(io.Discard, c)
			return "mqtt " + failureOf(err)
		}
		fmt.Fprintf(c, "GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
		return status(c)
	})
}

// forgedUDP sends packets of no channel.
func forgedUDP(a *attacker) {
	address := a.node.Setting("--udp-listen")
	a.workers(2, func(int, int) string {
		c, err := net.Dial("udp", address)
		if err != nil {
			return failure(err)
		}
		defer func() { _ = c.Close() }()
		packet := make([]byte, 120)
		packet[0], packet[3] = 1, 104
		for n := 0; a.ctx.Err() == nil; n++ {
			packet[4], packet[5], packet[6], packet[7] = byte(n), byte(n>>8), byte(n>>16), byte(n>>24)
			if _, err := c.Write(packet); err == nil {
				a.note("sent")
			}
			if n%32 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		return "end"
	})
}
