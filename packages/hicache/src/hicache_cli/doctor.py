import click


@click.command()
def doctor(): ...
