// Package client is a device of tests over a real connection: the transport of
// the firmware, and what the test has it say.
package client

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/simulator/firmware"
)

// Hellos of a device with MCP, as firmware without pushed glyphs writes them.
const (
	HelloWebSocket = `{"type":"hello","version":1,"features":{"mcp":true},"transport":"websocket",` + helloAudio
	HelloMQTT      = `{"type":"hello","version":3,"transport":"udp","features":{"mcp":true},` + helloAudio

	helloAudio = `"audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`
)

// Client is the far end of one real connection, with the transport of the
// firmware: the test decides what the device sends. It implements
// devicetest.Device and is safe for concurrent use.
type Client struct {
	*firmware.Line
	text  chan string
	audio chan []byte   // over the WebSocket
	done  chan struct{} // the connection has ended
	quit  chan struct{} // nobody receives any more
	read  sync.WaitGroup

	end     sync.Once
	mu      sync.Mutex
	channel *Channel
}

// Dial logs a device in.
func Dial(login firmware.Login) (*Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	line, err := login.Dial(ctx, firmware.Defaults())
	if err != nil {
		return nil, err
	}
	return New(line), nil
}

// New returns the client of a connection whose device has logged in.
func New(line *firmware.Line) *Client {
	line.KeepAlive()
	c := &Client{Line: line, text: make(chan string, 1000), audio: make(chan []byte, 1000), done: make(chan struct{}), quit: make(chan struct{})}
	c.read.Go(c.receive)
	return c
}

// receive sorts what arrives until the connection ends.
func (c *Client) receive() {
	defer close(c.done)
	defer close(c.text)
	for {
		m, err := c.Line.Receive()
		switch {
		case err != nil:
			return
		case m.Audio:
			select {
			case c.audio <- bytes.Clone(m.Data):
			case <-c.quit:
			}
		default:
			select {
			case c.text <- string(m.Data):
			case <-c.quit:
			}
		}
	}
}

// Send implements devicetest.Device.
func (c *Client) Send(text string) error { return c.Line.Send([]byte(text)) }

// Receive implements devicetest.Device.
func (c *Client) Receive() (string, error) {
	text, more := <-c.text
	if !more {
		return "", io.EOF
	}
	return text, nil
}

// Gone is closed when the connection has ended.
func (c *Client) Gone() <-chan struct{} { return c.done }

// SendAudio implements devicetest.Device.
func (c *Client) SendAudio(opus []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.channel == nil {
		return c.Line.SendAudio(opus)
	}
	return c.channel.Send(opus)
}

// ReceiveAudio implements devicetest.Device.
func (c *Client) ReceiveAudio() ([]byte, error) {
	audio := c.audio
	c.mu.Lock()
	if c.channel != nil {
		audio = c.channel.Packets
	}
	c.mu.Unlock()
	select {
	case opus := <-audio:
		return opus, nil
	case <-c.done:
	case <-time.After(5 * time.Second):
		return nil, errors.New("no audio within 5 s")
	}
	select {
	case opus := <-audio: // it arrived before the end
		return opus, nil
	default:
		return nil, io.EOF
	}
}

// HandleHello implements devicetest.Device: it opens the channel that a server's hello describes,
// with a new socket each time.
func (c *Client) HandleHello(hello string) error {
	if !strings.Contains(hello, `"udp"`) {
		return nil
	}
	channel, err := OpenChannel(hello)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.channel != nil {
		c.channel.Close()
	}
	c.channel = channel
	return nil
}

// Close ends the connection, and waits until nothing of it runs. Any number of
// times.
func (c *Client) Close() {
	c.Line.Close()
	c.end.Do(func() { close(c.quit) })
	c.mu.Lock()
	if c.channel != nil {
		c.channel.Close()
	}
	c.mu.Unlock()
	c.read.Wait()
}

// Channel is a device's audio over UDP. Sending and receiving are independent of
// each other; each belongs to one goroutine.
type Channel struct {
	*firmware.Audio
	Conn    net.Conn      // to the server
	Packets chan []byte   // Opus packets of the server
	Dropped atomic.Uint64 // datagrams that the firmware does not accept

	reader sync.WaitGroup
}

// OpenChannel opens the channel that a server's hello describes.
func OpenChannel(hello string) (*Channel, error) {
	audio, err := firmware.ReadAudio([]byte(hello))
	if err != nil {
		return nil, err
	}
	receiving := *audio // sequences of the two directions have nothing to do with each other
	c := &Channel{Audio: audio, Packets: make(chan []byte, 1000)}
	if c.Conn, err = net.Dial("udp4", audio.Server.String()); err != nil {
		return nil, err
	}
	c.reader.Go(func() {
		buf := make([]byte, 1500)
		for {
			n, err := c.Conn.Read(buf)
			if err != nil {
				return
			}
			opus, verdict := receiving.Open(buf[:n])
			if verdict != firmware.Accepted {
				c.Dropped.Add(1)
				continue
			}
			select {
			case c.Packets <- bytes.Clone(opus):
			default: // the test has long had enough
			}
		}
	})
	return c, nil
}

// Socket is another source address towards the server, until the test ends.
func (c *Channel) Socket(t testing.TB) net.Conn {
	t.Helper()
	conn, err := net.Dial("udp4", c.Server.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// Send sends the next packet.
func (c *Channel) Send(opus []byte) error {
	_, err := c.Conn.Write(c.Seal(nil, opus, 0))
	return err
}

// Close closes the channel without a message to the server.
func (c *Channel) Close() {
	_ = c.Conn.Close()
	c.reader.Wait()
}
