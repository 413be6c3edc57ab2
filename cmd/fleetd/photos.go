package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"fleetd/internal/apiclient"
)

type photosCmd struct {
	List   photosListCmd   `cmd:"" default:"withargs" help:"List photos, newest first, or download them all (the default)."`
	Get    photosGetCmd    `cmd:"" help:"Download one photo."`
	Delete photosDeleteCmd `cmd:"" help:"Delete one photo."`
}

type photosListCmd struct {
	Device string `arg:"" optional:"" help:"Only photos of this device."`
	Output string `short:"o" help:"Download them into this directory as ID.jpg; those that are there already are left out." placeholder:"DIR"`
	JSON   bool   `name:"json" help:"Print the server's JSON, one photo per line."`
	clientFlags
}

// Run prints the photos, or downloads them.
func (cmd *photosListCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	if cmd.Output != "" {
		if err := os.MkdirAll(cmd.Output, 0o700); err != nil {
			return failed("%w", err)
		}
	}
	rows := [][]string{{"ID", "DEVICE", "TAKEN", "KIND", "SIZE", "QUESTION"}}
	for p, err := range c.Photos(ctx, cmd.Device) {
		if err != nil {
			return err
		}
		if cmd.Output != "" {
			if err := cmd.download(ctx, a, c, p); err != nil {
				return err
			}
		}
		switch {
		case cmd.JSON:
			if err := printJSONLine(a.stdout, p.Raw); err != nil {
				return err
			}
		case cmd.Output == "":
			rows = append(rows, []string{p.ID, p.Device, p.TakenAt.UTC().Format(time.RFC3339), cmp.Or(p.Kind, "-"), sizeText(p.Bytes), cmp.Or(p.Question, "-")})
		}
	}
	switch {
	case cmd.JSON, cmd.Output != "":
		return nil
	case len(rows) == 1:
		_, err := fmt.Fprintln(a.stdout, "no photos")
		return err
	}
	return a.table(a.stdout, "", rows)
}

// photoName is what an id must look like to be the name of a file.
var photoName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]*$`)

// download keeps one photo in the directory.
func (cmd *photosListCmd) download(ctx context.Context, a *app, c *apiclient.Client, p apiclient.Photo) error {
	if !photoName.MatchString(p.ID) {
		return fmt.Errorf("the id %q of a photo cannot be a file name", p.ID)
	}
	path := filepath.Join(cmd.Output, p.ID+".jpg")
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err // nil: it is there already
	}
	size, err := writeFile(path, func(w io.Writer) (int64, error) { return c.Photo(ctx, p.ID, w) })
	if problem := (*apiclient.Problem)(nil); errors.As(err, &problem) && problem.Code == "not_found" {
		return nil // deleted since it was listed
	}
	if err != nil || cmd.JSON {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "%s: %s\n", path, sizeText(size))
	return err
}

type photosGetCmd struct {
	ID     string `arg:"" help:"Id of the photo, as the list shows it."`
	Output string `short:"o" required:"" help:"File to write; - is standard output." placeholder:"FILE"`
	clientFlags
}

// Run downloads one photo.
func (cmd *photosGetCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	return a.save(cmd.Output, func(w io.Writer) (int64, error) { return c.Photo(ctx, cmd.ID, w) })
}

type photosDeleteCmd struct {
	ID string `arg:"" help:"Id of the photo, as the list shows it."`
	clientFlags
}

// Run deletes one photo.
func (cmd *photosDeleteCmd) Run(ctx context.Context, a *app) error {
	return a.change(ctx, cmd.clientFlags, (*apiclient.Client).DeletePhoto, cmd.ID, "deleted")
}
