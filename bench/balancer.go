package main

import (
	"bytes"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"fleetd/bench/load"
)

// balancer is the one address of a fleet's devices. It gives connections to nodes in turn, and skips those that refuse.
// Of each WebSocket it notes whose it is, since when, and on which node.
type balancer struct {
	listener net.Listener
	nodes    []string
	live     sync.WaitGroup

	mu       sync.Mutex
	next     int
	pairs    map[*pair]bool
	held     map[string]*pair // by device
	returned func(device string, p *pair)
	closed   bool
}

// pair is a device's connection and the node's.
type pair struct {
	device, server net.Conn
	node           int
	since          time.Time // when the device's connection was accepted
}

func newBalancer(nodes ...string) (*balancer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	b := &balancer{listener: l, nodes: nodes, pairs: map[*pair]bool{}, held: map[string]*pair{}}
	b.live.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b.live.Go(func() { b.carry(c, time.Now()) })
		}
	})
	return b, nil
}

func (b *balancer) address() string { return b.listener.Addr().String() }

// close ends every connection.
func (b *balancer) close() {
	_ = b.listener.Close() // nobody is left to connect
	b.mu.Lock()
	b.closed = true
	for p := range b.pairs {
		p.close()
	}
	b.mu.Unlock()
	b.live.Wait()
}

func (p *pair) close() {
	_ = p.device.Close() // either may have ended
	_ = p.server.Close()
}

// carry connects a device with a node until either ends.
func (b *balancer) carry(c net.Conn, since time.Time) {
	// The node is not dialled before the device speaks: nobody is silent first.
	head := make([]byte, 4096)
	n := 0
	_ = c.SetReadDeadline(since.Add(load.ExchangeLimit)) // an error shows at the read
	for !bytes.Contains(head[:n], []byte("\r\n\r\n")) && n < len(head) {
		k, err := c.Read(head[n:])
		if n += k; err != nil {
			_ = c.Close()
			return
		}
	}
	_ = c.SetReadDeadline(time.Time{})
	server, node, err := b.dial()
	if err != nil {
		_ = c.Close() // the device tries again
		return
	}
	p := &pair{c, server, node, since}
	device := webSocketOf(head[:n])
	if !b.enter(p, device) {
		p.close()
		return
	}
	defer b.leave(p, device)
	b.live.Go(func() { pump(p, c, server) })
	if _, err := server.Write(head[:n]); err == nil {
		pump(p, server, c)
	}
}

// webSocketOf is the device that requests a WebSocket with this request, empty if nobody does.
func webSocketOf(request []byte) string {
	if !bytes.HasPrefix(request, []byte("GET /xiaozhi/v1/")) {
		return ""
	}
	_, rest, _ := bytes.Cut(request, []byte("\r\nDevice-Id: "))
	id, _, _ := bytes.Cut(rest, []byte("\r\n"))
	return strings.ToLower(string(id))
}

// dial connects to the node whose turn it is, or to the next one that runs.
func (b *balancer) dial() (c net.Conn, node int, err error) {
	for range b.nodes {
		b.mu.Lock()
		node = b.next
		b.next = (b.next + 1) % len(b.nodes)
		b.mu.Unlock()
		c, err := net.DialTimeout("tcp", b.nodes[node], time.Second)
		if err == nil {
			return c, node, nil
		}
	}
	return nil, 0, errors.New("no node listens")
}

func (b *balancer) enter(p *pair, device string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false
	}
	b.pairs[p] = true
	if device != "" {
		b.held[device] = p
		if b.returned != nil {
			b.returned(device, p)
		}
	}
	return true
}

func (b *balancer) leave(p *pair, device string) {
	p.close()
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.pairs, p)
	if b.held[device] == p {
		delete(b.held, device)
	}
}

// pump copies until either side ends, and then ends both. The kernel's own way of copying would take two more files for
// each direction.
func pump(p *pair, to, from net.Conn) {
	defer p.close()
	buf := make([]byte, 2048)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// lose begins to report the returns of the devices that a node holds now, and returns them.
func (b *balancer) lose(node int, returned func(device string, p *pair)) (lost []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	away := map[string]bool{}
	for device, p := range b.held {
		if p.node == node {
			away[device] = true
		}
	}
	b.returned = func(device string, p *pair) {
		if away[device] && p.node != node {
			delete(away, device) // its first return counts
			returned(device, p)
		}
	}
	for device := range away {
		lost = append(lost, device)
	}
	slices.Sort(lost)
	return lost
}

// steady are the devices that have been connected for at least that long.
func (b *balancer) steady(long time.Duration) map[string]*pair {
	b.mu.Lock()
	defer b.mu.Unlock()
	devices := map[string]*pair{}
	for device, p := range b.held {
		if time.Since(p.since) >= long {
			devices[device] = p
		}
	}
	return devices
}
