package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/fleetbench/load"
)

// localPostgres is asked for if the environment names no server.
const localPostgres = "postgres://root@127.0.0.1:5432/postgres"

// postgres is a server on which databases come and go.
type postgres struct{ url string }

// findPostgres takes the server of FLEETD_TEST_POSTGRES, else a local one. An error says that there is none.
func findPostgres(ctx context.Context) (*postgres, error) {
	p := &postgres{url: os.Getenv("FLEETD_TEST_POSTGRES")}
	if p.url == "" {
		p.url = localPostgres
	}
	return p, p.execute(ctx, "SELECT 1")
}

// execute runs one statement on a connection of its own.
func (p *postgres) execute(ctx context.Context, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return fmt.Errorf("postgres: %w", err)
	}
	_, err = conn.Exec(ctx, statement)
	return errors.Join(err, conn.Close(ctx))
}

// create makes an empty database. Dropping it works after ctx has ended too.
func (p *postgres) create(ctx context.Context) (database string, drop func() error, err error) {
	u, err := url.Parse(p.url)
	if err != nil {
		return "", nil, fmt.Errorf("postgres: %w", err)
	}
	name := "fleetd_bench_" + randomName()
	if err := p.execute(ctx, "CREATE DATABASE "+name+" ENCODING 'UTF8' TEMPLATE template0"); err != nil {
		return "", nil, err
	}
	u.Path = "/" + name
	return u.String(), func() error {
		return p.execute(context.WithoutCancel(ctx), "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	}, nil
}

func randomName() string {
	var b [6]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// natsCommand is the hidden command under which this program runs a NATS server for itself.
const natsCommand = "nats-server"

// serveNATS runs a NATS server with JetStream in dir until standard input ends, and leaves its URL in the file `url`.
func serveNATS(dir string) error {
	s, err := server.NewServer(&server.Options{ServerName: "fleetbench", Host: "127.0.0.1", Port: server.RANDOM_PORT,
		JetStream: true, StoreDir: dir, JetStreamMaxStore: 64 << 30, NoSigs: true, NoLog: true})
	if err != nil {
		return err
	}
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	if !s.ReadyForConnections(startLimit) {
		return errors.New("the NATS server does not start")
	}
	partial := filepath.Join(dir, "url.partial")
	if err := errors.Join(os.WriteFile(partial, []byte(s.ClientURL()), 0o600), os.Rename(partial, filepath.Join(dir, "url"))); err != nil {
		return err
	}
	for b := make([]byte, 1); ; {
		if _, err := os.Stdin.Read(b); err != nil {
			return nil // the parent is gone, or done
		}
	}
}

// external is a NATS server outside the daemon.
type external struct {
	url  string
	pid  string // empty: not a process of this program
	stop func() error
}

// startNATS takes the server of FLEETD_TEST_NATS, else runs one in a process of its own.
func startNATS(ctx context.Context) (external, error) {
	if given := os.Getenv("FLEETD_TEST_NATS"); given != "" {
		return external{url: given, stop: func() error { return nil }}, nil
	}
	self, err := os.Executable()
	if err != nil {
		return external{}, err
	}
	dir, err := os.MkdirTemp("", "fleetbench-nats")
	if err != nil {
		return external{}, err
	}
	cmd := exec.Command(self, natsCommand, dir)
	load.DieWithParent(cmd)
	stdin, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return external{}, errors.Join(err, os.RemoveAll(dir))
	}
	x := external{pid: strconv.Itoa(cmd.Process.Pid), stop: func() error {
		_ = stdin.Close() // ends it
		timer := time.AfterFunc(stopLimit, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		_ = cmd.Wait() // how it ended is of no interest
		return os.RemoveAll(dir)
	}}
	for deadline := time.Now().Add(startLimit); ; time.Sleep(20 * time.Millisecond) {
		content, err := os.ReadFile(filepath.Join(dir, "url"))
		if err == nil {
			x.url = string(content)
			return x, nil
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return external{}, errors.Join(errors.New("the NATS server of the benchmark does not start"), x.stop())
		}
	}
}

// removeStreams deletes what a node with this prefix left on the server.
func (x external) removeStreams(ctx context.Context, prefix string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	conn, err := nats.Connect(x.url)
	if err != nil {
		return fmt.Errorf("nats: %w", err)
	}
	defer conn.Close()
	js, err := jetstream.New(conn)
	if err != nil {
		return fmt.Errorf("nats: %w", err)
	}
	mark := strings.ToUpper(strings.ReplaceAll(prefix, ".", "_"))
	var faults error
	names := js.StreamNames(ctx)
	for name := range names.Name() {
		if strings.Contains(name, mark) { // object stores are streams too, with a prefix of their own
			faults = errors.Join(faults, js.DeleteStream(ctx, name))
		}
	}
	return errors.Join(faults, names.Err())
}
