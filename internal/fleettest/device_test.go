package fleettest

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"fleetd/internal/devicetest"
	"fleetd/internal/devicetest/client"
	"fleetd/simulator/firmware"
)

// otaReply is the OTA reply as a device reads it.
type otaReply struct {
	Firmware *struct {
		Version string
		URL     string
		Force   json.RawMessage
	}
	Activation *struct{ Code, Message, Challenge string }
	MQTT       *struct {
		Endpoint, Username, Password string
		ClientID                     string `json:"client_id"`
		PublishTopic                 string `json:"publish_topic"`
		SubscribeTopic               string `json:"subscribe_topic"`
		Keepalive                    int
	}
	WebSocket *struct {
		URL, Token string
		Version    int
	}
	raw   string
	login firmware.Login
}

// checkIn requests the OTA address as a device does at its boot.
func checkIn(t testing.TB, ota, id, body string) (reply otaReply, status int) {
	t.Helper()
	for until := time.Now().Add(30 * time.Second); ; { // on a busy machine the node joins the database late
		reply, status = checkInOnce(t, ota, id, body)
		if status != http.StatusServiceUnavailable || time.Now().After(until) {
			return reply, status
		}
		time.Sleep(300 * time.Millisecond)
	}
}

func checkInOnce(t testing.TB, ota, id, body string) (reply otaReply, status int) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ota, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header = http.Header{"Device-Id": {id}, "Client-Id": {clientOf(id)}, "User-Agent": {"bread-compact-wifi/2.4.2"}, "Content-Type": {"application/json"}}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if response.StatusCode == http.StatusOK {
		if err := json.Unmarshal(text, &reply); err != nil {
			t.Fatalf("OTA reply %s: %v", text, err)
		}
		read, err := new(firmware.Flash).ReadReply(text, "2.4.2")
		if err != nil {
			t.Fatalf("a device reads the OTA reply %s: %v", text, err)
		}
		reply.login = read.Login
		reply.login.Device, reply.login.Client, reply.login.SubscribeTopic = id, clientOf(id), ""
	}
	reply.raw = string(text)
	return reply, response.StatusCode
}

// clientOf is the Client-Id of a device of the tests.
func clientOf(id string) string { return "client-of-" + strings.ReplaceAll(id, ":", "") }

// login is what a device logs in with.
type login struct{ firmware.Login }

// boot requests the OTA address and returns what the device logs in with.
func boot(t testing.TB, ota, id string) login {
	t.Helper()
	reply, status := checkIn(t, ota, id, "{}")
	if status != http.StatusOK || reply.MQTT == nil {
		t.Fatalf("OTA check: %d %s", status, reply.raw)
	}
	return login{reply.login}
}

// device is a client that answers MCP by its script.
type device struct {
	*devicetest.Script
	*client.Client
	hellos chan string
}

// dial logs in; the connection ends with the test.
func (l login) dial(t testing.TB, script *devicetest.Script) *device {
	t.Helper()
	d, err := l.connect(script)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

func (l login) connect(script *devicetest.Script) (*device, error) {
	c, err := client.Dial(l.Login)
	if err != nil {
		return nil, err
	}
	d := &device{Script: script, Client: c, hellos: make(chan string, 10)}
	go script.Play(d)
	return d, nil
}

// HandleHello keeps hellos for the callers that wait for them.
func (d *device) HandleHello(hello string) error {
	d.hellos <- hello
	return nil
}

// hello opens an audio channel as the firmware does: a new socket each time.
func (d *device) hello(t testing.TB) *channel {
	t.Helper()
	if err := d.Send(client.HelloMQTT); err != nil {
		t.Fatal(err)
	}
	c, err := client.OpenChannel(await(t, "the server's hello", d.hellos))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return &channel{Channel: c}
}

// channel is the audio of one conversation, packet by packet.
type channel struct {
	*client.Channel
	seq uint32
}

func (c *channel) ssrc() string {
	ssrc := c.SSRC()
	return hex.EncodeToString(ssrc[:])
}

// say sends frame number n, which is its sequence, too.
func (c *channel) say(t testing.TB) {
	t.Helper()
	c.seq++
	if _, err := c.Conn.Write(c.SealAs(c.seq, frame(c.seq))); err != nil {
		t.Fatal(err)
	}
}

const frameTime = 60 * time.Millisecond

// frame is an Opus packet of 60 ms unlike any other, of the size of speech:
// SILK wideband, mono (RFC 6716, configuration 11, code 0).
func frame(n uint32) []byte {
	return append(fmt.Appendf([]byte{11 << 3}, "frame %08d ", n), bytes.Repeat([]byte{byte(n)}, 70)...)
}

// numberOf is the reverse of frame.
func numberOf(opus []byte) (n uint32, ok bool) {
	_, err := fmt.Sscanf(string(opus[min(1, len(opus)):min(len(opus), 15)]), "frame %08d", &n)
	return n, err == nil && bytes.Equal(opus, frame(n))
}

// every calls f each interval, n times, by the clock: a busy machine does not
// stretch the stream.
func every(t testing.TB, interval time.Duration, n int, f func(i int)) {
	t.Helper()
	begun := time.Now()
	for i := range n {
		f(i)
		select {
		case <-time.After(time.Until(begun.Add(time.Duration(i+1) * interval))):
		case <-t.Context().Done():
			return
		}
	}
}
