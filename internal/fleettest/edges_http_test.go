package fleettest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devicetest/client"
)

// post sends the head of a request, and no body; the connection ends with the
// test.
func post(t *testing.T, address, path, header string) net.Conn {
	t.Helper()
	c := client.DialRaw(t, address)
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n%s\r\n", path, header); err != nil {
		t.Fatal(err)
	}
	return c
}

// answerOf is the status of the answer which comes within limit, 0 without one; ended
// reports whether the connection was closed after it by then.
func answerOf(c net.Conn, limit time.Duration) (code int, ended bool) {
	_ = c.SetReadDeadline(time.Now().Add(limit))
	in := bufio.NewReader(c)
	answer, err := http.ReadResponse(in, nil)
	if err != nil {
		return 0, false
	}
	_, _ = io.Copy(io.Discard, answer.Body)
	_, err = in.ReadByte()
	timeout, is := err.(net.Error)
	return answer.StatusCode, err != nil && (!is || !timeout.Timeout())
}

// Bodies that never come hold no connection, on any listener that speaks HTTP:
// a request without a token is answered at once, and everything else goes on.
func TestBodiesThatNeverCome(t *testing.T) {
	t.Parallel()
	gateway := freePort(t)
	node := programs.limited(t, 300).Start(t, "--gateway-api-listen", gateway, "--gateway-signature-key", gatewayKey)
	api := strings.TrimPrefix(node.Info.API, "http://")
	device := strings.TrimPrefix(node.Info.Device, "http://")
	// With a token a body that does not come ends with its time, which passes during the rest.
	slow := post(t, api, "/v1/devices/02:00:00:00:00:01/mcp", "Authorization: Bearer "+node.Token(t)+"\r\n")
	var wait sync.WaitGroup
	for _, request := range []struct {
		address, path, header string
		status                int
	}{
		{api, "/v1/devices/rotate", "", 401}, {api, "/v1/nowhere", "", 401}, {api, "/mcp", "", 401}, {api, "/metrics", "", 405},
		{gateway, "/api/commands/x", "", 401}, {gateway, "/nowhere", "", 404},
		{device, "/xiaozhi/vision/explain", "Device-Id: 02:00:00:00:00:01\r\n", 401}, {device, "/nowhere", "", 404},
	} {
		c := post(t, request.address, request.path, request.header)
		wait.Go(func() { // each takes a second, which is left for the rest of a body
			code, ended := answerOf(c, 5*time.Second)
			// security: N30
			if code != request.status || !ended {
				t.Errorf("POST %s without a body: status %d, closed %v; want %d and closed", request.path, code, ended, request.status)
			}
		})
	}
	wait.Wait()
	var mu sync.Mutex
	answered := 0
	for range 400 {
		c := post(t, api, "/v1/devices/rotate", "")
		wait.Go(func() { // those beyond the limit of connections get no answer
			if code, _ := answerOf(c, 3*time.Second); code == http.StatusUnauthorized {
				mu.Lock()
				answered++
				mu.Unlock()
			}
		})
	}
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", "5", "--seed", "7")
	node.AwaitReady(t, 5)
	wait.Wait()
	if answered == 0 {
		t.Error("no token-less request was answered")
	}
	if code, ended := answerOf(slow, 15*time.Second); code != http.StatusBadRequest || !ended {
		t.Errorf("a body that never comes: status %d, closed %v", code, ended)
	}
	if n := node.Metric(t, "fleetd_slow_clients_total", `listener="api-listen"`, `what="body"`); n != 1 {
		t.Errorf("%v bodies are counted as too slow, want 1", n)
	}
	for range 50 {
		post(t, api, "/v1/devices/rotate", "")
	}
	begun := time.Now()
	node.Stop(t)
	if took := time.Since(begun); took > 6*time.Second {
		t.Errorf("a stop took %v", took)
	}
}

// Refused connections of the gateway's API that are kept open end.
func TestRefusedConnectionsAreClosed(t *testing.T) {
	t.Parallel()
	gateway := freePort(t)
	node := programs.Start(t, "--gateway-api-listen", gateway, "--gateway-signature-key", gatewayKey)
	for _, address := range []string{gateway, strings.TrimPrefix(node.Info.API, "http://")} {
		for _, header := range []string{"", "Authorization: Bearer wrong\r\n"} {
			c := client.DialRaw(t, address)
			if _, err := fmt.Fprintf(c, "POST /api/devices/status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n%s\r\n{}", header); err != nil {
				t.Fatal(err)
			}
			// security: N30
			if code, ended := answerOf(c, 5*time.Second); code != http.StatusUnauthorized || !ended {
				t.Errorf("%s: status %d, closed %v", address, code, ended)
			}
		}
	}
}

// Refused requests of the gateway's API write a bounded log.
func TestRefusalsWriteABoundedLog(t *testing.T) {
	t.Parallel()
	gateway := freePort(t)
	node := programs.Start(t, "--gateway-api-listen", gateway, "--gateway-signature-key", gatewayKey)
	const requests = 500
	for range requests {
		answer, err := http.Post("http://"+gateway+"/api/devices/status", "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
	}
	// security: N31
	if lines := strings.Count(node.Log.String(), "gateway API request"); lines == 0 || lines > requests/5 {
		t.Errorf("%d refused requests wrote %d lines", requests, lines)
	}
}
