// Package services is what programs that measure a fleet need besides it: their main function, databases in Postgres that come
// and go, and NATS servers in processes of their own.
package services

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"

	"fleetd/bench/load"
	"fleetd/internal/natstest"
)

// Main is the main function of a program. Its first argument may name one of the servers, which it then is instead; see
// load.StartChild.
func Main(name string, run func(ctx context.Context, arguments []string, stdout, stderr io.Writer) error, servers map[string]func(argument string) error) {
	err := Serve(os.Args, servers)
	if errors.Is(err, errNoServer) {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err = run(ctx, os.Args[1:], os.Stdout, os.Stderr)
		stop()
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

var errNoServer = errors.New("the command line names no server")

// Serve is the server that a command line names, for programs whose tests start them. Served reports whether it names one.
func Serve(commandLine []string, servers map[string]func(argument string) error) error {
	if len(commandLine) == 3 {
		if serve := servers[commandLine[1]]; serve != nil {
			return serve(commandLine[2])
		}
	}
	return errNoServer
}

// Served reports whether Serve was one of the servers.
func Served(err error) bool { return !errors.Is(err, errNoServer) }

// localPostgres is used if the environment names no server.
const localPostgres = "postgres://root@127.0.0.1:5432/postgres"

// Postgres is a server on which databases come and go.
type Postgres struct{ URL string }

// FindPostgres takes the server of FLEETD_TEST_POSTGRES, else a local one. An error means that it cannot be used.
func FindPostgres(ctx context.Context) (*Postgres, error) {
	p := &Postgres{URL: os.Getenv("FLEETD_TEST_POSTGRES")}
	if p.URL == "" {
		p.URL = localPostgres
	}
	return p, p.Execute(ctx, "SELECT 1")
}

// Execute runs one statement on a connection of its own.
func (p *Postgres) Execute(ctx context.Context, statement string) error {
	return p.connected(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, statement)
		return err
	})
}

// Query reads one value.
func (p *Postgres) Query(ctx context.Context, statement string, value any) error {
	return p.connected(ctx, func(ctx context.Context, conn *pgx.Conn) error { return conn.QueryRow(ctx, statement).Scan(value) })
}

func (p *Postgres) connected(ctx context.Context, use func(ctx context.Context, conn *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, p.URL)
	if err == nil {
		err = errors.Join(use(ctx, conn), conn.Close(ctx))
	}
	if err != nil {
		return fmt.Errorf("postgres: %w", err)
	}
	return nil
}

// Create makes an empty database whose name begins with prefix. Dropping it works after ctx has ended, too.
func (p *Postgres) Create(ctx context.Context, prefix string) (database string, drop func() error, err error) {
	u, err := url.Parse(p.URL)
	if err != nil {
		return "", nil, fmt.Errorf("postgres: %w", err)
	}
	name := prefix + RandomName()
	// Interrupted half way, the server may make the database all the same.
	if err := p.Execute(context.WithoutCancel(ctx), "CREATE DATABASE "+name+" ENCODING 'UTF8' TEMPLATE template0"); err != nil {
		return "", nil, err
	}
	u.Path = "/" + name
	return u.String(), func() error {
		return p.Execute(context.WithoutCancel(ctx), "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
	}, nil
}

// RandomName is a name that nothing else has: lower-case letters and digits.
func RandomName() string { return strings.ToLower(rand.Text()[:10]) }

// ServeNATS is the child process of a server: its address is its URL, and answer, which may be nil, answers questions about it.
// change, which may be nil too, sets further options.
func ServeNATS(name, dir string, change func(*server.Options), answer func(s *server.Server, question string) (any, error)) error {
	o := server.Options{ServerName: name, JetStream: true, StoreDir: dir, JetStreamMaxStore: 64 << 30}
	if change != nil {
		change(&o)
	}
	s, err := natstest.Run(o)
	if err != nil {
		return err
	}
	defer natstest.Stop(s)
	return load.Answer(s.ClientURL(), func(question string) (any, error) {
		if answer == nil {
			return nil, nil
		}
		return answer(s, question)
	})
}
